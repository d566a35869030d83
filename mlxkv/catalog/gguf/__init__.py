"""GGUF files, as llama.cpp, LM Studio and ollama keep models: read in the hub's terms."""
