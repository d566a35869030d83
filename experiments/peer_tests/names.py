"""What the command and its plugin agree on. Nothing is imported: the plugin comes before MLX."""

PLUGIN = "experiments.peer_tests.plugin"
CACHES, OUT = "MLXKV_PEER_CACHES", "MLXKV_PEER_OUT"  # which caches, and the file of outcomes
KINDS = ("plain", "int4", "tight")
MODEL = "a random qwen2"  # in place of the chat model that the tests fetch
