#!/bin/sh
# Memory, then a folder of this machine, then a server that other machines share. The nearest tier that has a page gives it.
exec vllm serve "${MODEL:?name a checkpoint}" \
  --enable-prefix-caching \
  --kv-transfer-config '{
    "kv_connector": "SamestateConnector",
    "kv_connector_module_path": "samestate.cache.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
      "cpu_bytes_to_use": 8589934592,
      "secondary_tiers": [
        {"type": "samestate-disk", "url": "file:///var/cache/samestate?budget=100GiB"},
        {"type": "samestate-valkey", "url": "valkey://127.0.0.1:6379/0", "time_limit_s": 2.0}
      ]
    }
  }' "$@"
