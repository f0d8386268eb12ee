"""On real vLLM: noise that is put into one module is found by name, and the run is unknown, not failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from quiet import Silent
from samestate.checks.analyzers import Judgement, judge, source_sha256
from samestate.checks.base import Finding, Verdict
from samestate.engines.base import Ask, EngineSpec, Generation
from samestate.engines.vllm import VllmEngine
from samestate.evidence.archive import Archive
from samestate.evidence.controls import CAPTURE_VARIABLE, EVERY_MODULE
from samestate.evidence.records import StepTraced
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.load import freeze, load

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.deep]

MODULE = "model.layers.1.mlp"
NOISE = f'''
import os
from pathlib import Path
import torch

def register():
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    inner = BaseModelLoader.load_model
    def load_model(self, *args, **kwargs):
        model = inner(self, *args, **kwargs)
        def noise(module, args, output):
            if not Path(os.environ["NOISE_WHERE"]).exists():
                return None
            return output + torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
        dict(model.named_modules())["{MODULE}"].register_forward_hook(noise)
        return model
    if "NOISE_WHERE" in os.environ:
        BaseModelLoader.load_model = load_model
'''


def plugin(folder: Path) -> Path:
    """A plugin of vLLM in a folder for PYTHONPATH: adds noise to `MODULE` while a file exists."""
    info = folder / "noise-0.0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "noise_plugin.py").write_text(NOISE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: noise\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nnoise = noise_plugin:register\n")
    return folder


class Noisy(VllmEngine):
    """Puts the noise on before an operation whose name ends so, in one arm."""

    arm, ending, where = "none", "", Path()

    @override
    def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
        if self._spec.arm == self.arm and asks[0].request.endswith(self.ending):
            self.where.touch()
        try:
            return super().generate(asks, output_tokens, seed, ignore_eos)
        finally:
            self.where.unlink(missing_ok=True)


def ran(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, arm: str, ending: str) -> Judgement:
    """`boundary` with one length, all modules traced, noise in one operation of `arm`."""
    where = folder / "noise"
    monkeypatch.setenv("PYTHONPATH", str(plugin(folder / "plugin")))
    monkeypatch.setenv("NOISE_WHERE", str(where))

    class Engine(Noisy):
        pass

    Engine.arm, Engine.ending, Engine.where = arm, ending, where

    def engine(spec: EngineSpec) -> Engine:
        return Engine(spec)

    plan = load("boundary")
    settings = plan.engine.settings | {"block_size": 256, "max_model_len": 2048, "max_num_batched_tokens": 2048}
    update = {"lengths": ["2C+1"], "output_tokens": 8, "engine": plan.engine.model_copy(update={"settings": settings})}
    plan = freeze(plan.model_copy(update=update), source_sha256(plan.analyzer.id))
    environment = {CAPTURE_VARIABLE: EVERY_MODULE}
    request = RunRequest(plan, model, folder / "run", engine, None, None, None, [], environment=environment)
    archive = Archive.open(run_plan(request, Silent()).archive)
    traced = [line.rec for line in archive.records("control", "scheduler") if isinstance(line.rec, StepTraced)]
    assert {rec.op for rec in traced} == {"N513.cold", "N513.interposer-1", "N513.interposer-2", "N513.reload"}
    assert sum(rec.tokens for rec in traced if rec.op == "N513.cold") >= 513
    return judge(archive)


def finding(judgement: Judgement, code: str) -> Finding:
    (found,) = {
        (one.message, one.place.layer): one
        for result in judgement.results
        for one in result.findings
        if one.code == code
    }.values()
    return found


def test_noise_in_one_cold_run_is_laid_to_the_module_that_has_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = ran(tmp_path, tiny_model, monkeypatch, "control", ".reload")
    assert judgement.verdict is Verdict.UNKNOWN
    found = finding(judgement, "control_not_repeatable")
    assert found.place.layer == MODULE
    assert f"not repeatable; the first module output that differs is {MODULE} (step 0, rank 0" in found.message
    # Candidate and control part in the reload too, and that is laid to nothing.
    assert "second cold run" in finding(judgement, "not_repeatable").message


def test_noise_in_one_engine_is_laid_to_the_module_that_has_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = ran(tmp_path, tiny_model, monkeypatch, "candidate", ".interposer-1")
    assert judgement.verdict is Verdict.UNKNOWN
    found = finding(judgement, "cold_differs")
    assert (found.place.op, found.place.layer) == ("N513.interposer-1", MODULE)


def test_without_noise_no_module_is_named(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judgement = ran(tmp_path, tiny_model, monkeypatch, "nobody", "")
    assert judgement.verdict is Verdict.PASS
    assert not [one for result in judgement.results for one in result.findings if one.place.layer]
