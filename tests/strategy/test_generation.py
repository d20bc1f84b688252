"""`self.model.generate(...)` on a cut model writes what one device writes, and leaves nothing behind."""

from __future__ import annotations

import functools
import gc
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.fitting import ONE_DEVICE, TWO_STAGES, Where, everywhere, fit, rows, stages, weights
from support.processes import run_processes
from support.tiny_models import VOCAB_SIZE, tiny_model
from support.training import QUIET, FineTune
from transformers import StoppingCriteria, StoppingCriteriaList

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.models.growing_cache import RowsCache

FAMILIES = ("llama", "gpt2", "gemma2", "mistral", "gpt_oss", "qwen3_next", "falcon")
WITHOUT_SDPA = ("gemma2", "gpt_oss")
THREE_STAGES = stages(3, num_chunks=2)
TWICE_TWO = stages(2, schedule="interleaved_seq1f1b", virtual_stages=2)
ONE_STAGE = stages(1)


def prompts() -> dict[str, torch.Tensor]:
    """Four rows; the second and the last are padded at the left."""
    ids = torch.randint(3, VOCAB_SIZE, (4, 23), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :7] = mask[3, :15] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


class Writes(FineTune):
    """Generates when it predicts; `how` are keyword arguments of generate, each set for one text."""

    def __init__(self, family: str, dtype: torch.dtype, how: dict[str, dict[str, Any]]) -> None:
        super().__init__(family, dtype)
        self.how = how

    def configure_model(self) -> None:
        attention = "eager" if self.family in WITHOUT_SDPA else "sdpa"
        self.model = tiny_model(self.family, self.model_dtype, attention=attention)

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        given = prompts()
        if self.family in WITHOUT_SDPA and self.model_dtype == torch.float64:
            # transformers' eager attention gives NaN for padding in float64.
            given = {"input_ids": given["input_ids"].clamp(min=3)}
        torch.manual_seed(3)
        texts = {
            name: self.model.generate(**{**given, "pad_token_id": 0, "use_cache": True, **how})
            for name, how in self.how.items()
        }
        scored = {"return_dict_in_generate": True, "output_logits": True, "use_cache": True}
        output = self.model.generate(**given, pad_token_id=0, do_sample=False, max_new_tokens=4, **scored)
        return {**texts, "random": torch.rand(3), "logits": torch.stack(output.logits)}


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 20, "do_sample": False},
    "sampled": {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 20},
}
MORE: dict[str, dict[str, Any]] = {
    "beams": {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "num_return_sequences": 2},
    "sampled beams": {"max_new_tokens": 8, "num_beams": 2, "do_sample": True},
    "several": {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3, "repetition_penalty": 1.2},
    "without a cache": {"max_new_tokens": 6, "do_sample": False, "use_cache": False},
    "prefilled in pieces": {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": 10},
}


def written(family: str, dtype: torch.dtype, how: dict[str, dict[str, Any]], where: Where) -> Any:
    strategy = where.strategy if isinstance(where.strategy, str) else Seq1F1BStrategy(**dict(where.strategy))
    precision = "64-true" if dtype == torch.float64 else "32-true"
    trainer = L.Trainer(devices=where.devices, strategy=strategy, precision=precision, **QUIET)
    (texts,) = trainer.predict(Writes(family, dtype, how), rows(2, 2))
    logits = texts.pop("logits")
    return {name: text.tolist() for name, text in texts.items()}, logits


def cases(families: tuple[str, ...], dtype: torch.dtype, how: dict[str, dict[str, Any]]) -> tuple[Any, ...]:
    return tuple(case_of(family, dtype, how is MORE) for family in families)


@functools.cache
def case_of(family: str, dtype: torch.dtype, more: bool) -> Any:
    return functools.partial(written, family, dtype, MORE if more else HOW)


@pytest.mark.parametrize(
    ("where", "dtype"), [(TWO_STAGES, torch.float64), (THREE_STAGES, torch.float32)], ids=["2 stages", "3 stages"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_equal_one_device(family, where, dtype):
    all_cases = cases(FAMILIES, dtype, HOW)
    case = case_of(family, dtype, False)
    ((expected, wanted),) = everywhere(all_cases, ONE_DEVICE)[case]
    assert len({token for row in expected["greedy"] for token in row[23:]}) > 3
    assert expected["sampled"] != expected["greedy"]
    for texts, logits in everywhere(all_cases, where)[case]:
        assert texts == expected
        # In float32 at all precisions: transformers' loop makes them so.
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("where", [TWO_STAGES, TWICE_TWO, ONE_STAGE], ids=["2 stages", "2 x 2 stages", "1 stage"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_beams_and_the_rest_equal_one_device(family, where):
    all_cases = cases(("llama", "qwen3_next"), torch.float32, MORE)
    case = case_of(family, torch.float32, True)
    ((expected, _),) = everywhere(all_cases, ONE_DEVICE)[case]
    for texts, _ in everywhere(all_cases, where)[case]:
        assert texts == expected


IN_TRAINING = {"pad_token_id": 0, "use_cache": True}


class WritesInTraining(Callback):
    """Samples after every training step, on a model in training mode, and greedily at the end."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.training: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        module.model.model.norm.eval()  # a mode of one module's own
        self.texts.append(module.model.generate(**prompts(), **IN_TRAINING, do_sample=True, max_new_tokens=5).tolist())
        self.training.append([m.training for m in module.model.modules()].count(False) == 1)


def in_training(where: Where) -> Any:
    callback, module = WritesInTraining(), FineTune(dtype=torch.float64)
    trainer = fit(where, module, rows(shuffle=True), callbacks=[callback])
    heads: list[Any] = []
    embedded: list[int] = []
    module.model.lm_head.register_forward_hook(lambda m, args, output: heads.append(tuple(output.shape)))
    embedding = module.model.model.embed_tokens
    hook = embedding.register_forward_hook(lambda m, args, output: embedded.append(args[0].numel()))
    (first,) = module.model.generate(prompts()["input_ids"][:1], max_new_tokens=9, do_sample=False, **IN_TRAINING)
    hook.remove()
    ending = int(first[-4])
    ended = module.model.generate(
        **prompts(), max_new_tokens=9, do_sample=False, **IN_TRAINING, eos_token_id=ending
    ).tolist()
    caches = sum(isinstance(each, RowsCache) for each in gc.get_objects())
    return callback.texts, callback.training, weights(trainer), first.tolist(), ended, caches, set(heads), embedded


def test_training_goes_on_as_on_one_device():
    (expected,) = everywhere((in_training,), ONE_DEVICE)[in_training]
    texts, training, whole, first, ended, _, _, embedded = expected
    assert embedded == [23, *[1] * 8]
    assert len(set(map(str, texts))) == len(texts) == 6
    assert 0 in ended[0][23:]  # the end-of-sequence token was met
    assert len(first) == 32
    ours = everywhere((in_training,), TWO_STAGES)[in_training]
    for seen in ours:
        assert seen[0] == texts
        assert all(seen[1])
        assert (seen[3], seen[4]) == (first, ended)
        assert seen[5] == 0
    assert all(training)
    for name, weight in ours[0][2].items():
        torch.testing.assert_close(weight, whole[name], rtol=0, atol=1e-10)
    # Never the logits of more than one token a row.
    assert all(tokens == 1 for _, tokens, _ in ours[-1][6])
    assert not ours[0][6]
    # The prompt in chunks, then token by token.
    assert sum(ours[0][7][:3]) == 23
    assert ours[0][7][3:] == [1] * 8


def adapted(where: Where) -> Any:
    peft = pytest.importorskip("peft")

    class Adapted(Writes):
        def configure_model(self) -> None:
            super().configure_model()
            torch.manual_seed(1)
            config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
            self.model = peft.get_peft_model(self.model, config)

    strategy = where.strategy if isinstance(where.strategy, str) else Seq1F1BStrategy(**dict(where.strategy))
    trainer = L.Trainer(devices=where.devices, strategy=strategy, **QUIET)
    (texts,) = trainer.predict(Adapted("llama", torch.float32, HOW), rows(2, 2))
    return {name: text.tolist() for name, text in texts.items() if name != "logits"}


def test_adapters_take_part():
    (expected,) = everywhere((adapted,), ONE_DEVICE)[adapted]
    for texts in everywhere((adapted,), TWO_STAGES)[adapted]:
        assert texts == expected


class Raises(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        raise KeyError("stop")


class Differs(FineTune):
    """Tries what must fail on all ranks, and then what must still work."""

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> list[str]:
        rank, ids = self.global_rank, prompts()["input_ids"]
        given = {"do_sample": False, "pad_token_id": 0, "use_cache": True}
        messages = []
        for arguments in (
            {"input_ids": ids + rank, "max_new_tokens": 3},
            {"input_ids": ids, "max_new_tokens": 3 + rank},
            {"input_ids": ids, "max_new_tokens": 3, "suppress_tokens": [5 + rank, 6, 7, 8] if rank else None},
            {"input_ids": ids, "max_new_tokens": 3, "stopping_criteria": StoppingCriteriaList([Raises()])},
            {"input_ids": ids, "max_new_tokens": 3, "max_time": 1.0},
            {"input_ids": ids, "max_new_tokens": 500},
        ):
            try:
                self.model.generate(**given, **arguments)
                messages.append("")
            except (ValueError, KeyError) as error:
                messages.append(str(error))
        caches = sum(isinstance(each, RowsCache) for each in gc.get_objects())
        # With generators that stand at different places the first rank's decides, and the other's is put back.
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        text = self.model.generate(ids, **{**given, "max_new_tokens": 3, "do_sample": True})
        assert torch.equal(before, torch.get_rng_state()) == (rank == 1)
        return [*messages, caches, text.tolist(), float(self.model(**batch).loss)]


def differing(rank: int) -> Any:
    trainer = L.Trainer(devices=2, strategy=Seq1F1BStrategy(num_chunks=2), **QUIET)
    module = Differs("gpt2", torch.float64)
    return trainer.predict(module, rows(2, 2))[0]


def test_ranks_that_differ_fail_alike_and_may_go_on():
    first, second = run_processes(differing, 2)
    assert first == second
    prompt, end, _, user, clock, long, caches, *_ = first
    assert 'hold different batches: "generate\'s input_ids" is rank 0' in prompt
    assert "rank 0 has come to the end of its text, others have not" in end
    assert user == "'stop'"
    assert "does not support max_time: every rank would stop by its own clock" in clock
    assert "text of 513 tokens, but the model has positions for 512" in long
    assert caches == 0
