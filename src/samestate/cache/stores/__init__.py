"""Places that keep pages: a folder, a Valkey or Redis server, an object store. They import neither torch nor vLLM."""
