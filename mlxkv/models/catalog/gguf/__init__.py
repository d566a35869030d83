"""GGUF files, as llama.cpp, LM Studio and ollama keep models: header, configuration and tokenizer in the hub's terms."""
