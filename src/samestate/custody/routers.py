"""The router that a spec names."""

from __future__ import annotations

from samestate.custody.base import Router
from samestate.custody.haproxy import HAProxy
from samestate.custody.spec import Spec
from samestate.custody.vllm_router import VllmRouter


def router(spec: Spec) -> Router:
    """Made, and not asked anything yet."""
    return VllmRouter(spec.router, spec.incumbent.url) if spec.router.kind == "vllm-router" else HAProxy(spec.router)
