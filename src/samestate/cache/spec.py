"""The offloading spec: vLLM's `OffloadingConnector` on platforms whose device memory is host memory.

Load it by name::

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "HostOffloadingSpec",
        "spec_module_path": "samestate.cache.spec", "cpu_bytes_to_use": 1073741824}}'

vLLM's scheduler side stays as it is: it aligns hybrid groups under the strict-prefix rule
(vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py) and its manager evicts by LRU.
On CUDA and XPU the worker is vLLM's own too; elsewhere vLLM refuses, and `HostWorker` copies.
"""

from __future__ import annotations

from typing_extensions import override
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from samestate.cache.host_worker import HostWorker


class HostOffloadingSpec(CPUOffloadingSpec):
    """`CPUOffloadingSpec` that also works where the device is the host.

    Raises:
        ValueError: the canonical layout is asked for on such a platform, or the budget
            holds not even one chunk.

    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._host_worker: HostWorker | None = None
        if config.worker_kv_bytes_per_block and not self.num_chunks:
            raise ValueError(
                f"cpu_bytes_to_use={self.extra_config['cpu_bytes_to_use']} holds no chunk: "
                f"one takes {self.kv_bytes_per_chunk} bytes; raise it or lower blocks_per_chunk"
            )

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if self.config.canonical_layout:
            raise ValueError("canonical_layout is not supported by the host worker: leave it off")
        if self._host_worker is None:
            self._host_worker = HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._host_worker
