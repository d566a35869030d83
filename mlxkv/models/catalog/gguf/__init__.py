"""GGUF files, as llama.cpp, LM Studio and ollama keep models: header, configuration tokenizer in the hub's terms."""
