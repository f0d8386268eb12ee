#!/bin/sh
# As disk.sh, inside the audit connector: look-ups, loads and saves go to /var/log/samestate, in files that rotate.
exec vllm serve "${MODEL:?name a checkpoint}" \
  --enable-prefix-caching \
  --kv-transfer-config '{
    "kv_connector": "AuditConnector",
    "kv_connector_module_path": "samestate.instruments.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
      "samestate": {
        "stream_dir": "/var/log/samestate", "arm": "live", "level": "metadata",
        "rotate_bytes": 67108864, "keep_files": 8
      },
      "connectors": [
        {
          "kv_connector": "SamestateConnector",
          "kv_connector_module_path": "samestate.cache.connector",
          "kv_role": "kv_both",
          "kv_connector_extra_config": {
            "cpu_bytes_to_use": 8589934592,
            "secondary_tiers": [
              {"type": "samestate-disk", "url": "file:///var/cache/samestate?budget=100GiB"}
            ]
          }
        }
      ]
    }
  }' "$@"
