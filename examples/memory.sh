#!/bin/sh
# Families in host memory, 8 GiB over all ranks; those that save least per byte go first.
exec vllm serve "${MODEL:?name a checkpoint}" \
  --enable-prefix-caching \
  --kv-transfer-config '{
    "kv_connector": "SamestateConnector",
    "kv_connector_module_path": "samestate.cache.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
      "cpu_bytes_to_use": 8589934592,
      "eviction_policy": "family-value"
    }
  }' "$@"
