#!/bin/sh
# 8 GiB in host memory, and a folder behind it that may hold 100 GiB.
exec vllm serve "${MODEL:?name a checkpoint}" \
  --enable-prefix-caching \
  --kv-transfer-config '{
    "kv_connector": "SamestateConnector",
    "kv_connector_module_path": "samestate.cache.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
      "cpu_bytes_to_use": 8589934592,
      "secondary_tiers": [
        {"type": "samestate-disk", "url": "file:///var/cache/samestate?budget=100GiB"}
      ]
    }
  }' "$@"
