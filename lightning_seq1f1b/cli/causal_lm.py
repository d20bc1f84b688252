"""The ready LightningModule: fine-tune a Hugging Face causal language model, or train one from scratch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from lightning_seq1f1b.cli.learning_rate import learning_rate_factor
from lightning_seq1f1b.cli.perplexity import Perplexity
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_KEY = "transformers_config"
"""Where a checkpoint keeps the model's configuration, so that it can be exported without the files it came from."""


class CausalLM(L.LightningModule):
    """A causal language model of transformers, trained on batches of `input_ids`, `attention_mask` and `labels`.

    An ordinary module: it runs the same with `strategy="auto"` on one device and with `Seq1F1BStrategy`. It logs
    `train_loss`, and `val_loss`, `val_perplexity`, `test_loss`, `test_perplexity`, which weigh every supervised token
    alike whatever batch it stands in.

    Args:
        model_name_or_path: A local directory or a hub name with a pretrained model. Give this or `config`.
        config: Train from scratch: a configuration as a dict with its `model_type`, or the path or name of one.
        learning_rate: Highest learning rate of the default optimizer, AdamW.
        weight_decay: Weight decay of the default optimizer. Norms and biases (parameters of one dimension) have none.
        warmup_steps: Optimizer steps in which the learning rate rises linearly to its highest value.
        decay: How the learning rate falls to zero between warm-up and the last step that the Trainer expects; "none"
            keeps it.
        optimizer: Makes another optimizer than AdamW from the parameter groups. Its own learning rate and weight decay
            hold then instead of `learning_rate` and `weight_decay`; norms and biases still have no weight decay.
        seed: Seed of the random weights of a model trained from scratch.
        recompute: Compute what is inside a layer again in its backward (gradient checkpointing): a third more work for
            a fraction of the activation memory.
        trust_remote_code: Run code that comes with the model's files, where its class is not one of transformers'.
            Without it such a model is refused.

    Raises:
        ValueError: Both or neither of `model_name_or_path` and `config` were given, or a number is out of range.
    """

    def __init__(
        self,
        model_name_or_path: str | None = None,
        config: dict[str, Any] | str | None = None,
        learning_rate: float = 2e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        decay: Literal["cosine", "linear", "none"] = "cosine",
        optimizer: OptimizerCallable | None = None,
        seed: int = 0,
        recompute: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        if (model_name_or_path is None) == (config is None):
            given = "neither" if config is None else "both"
            raise ValueError(
                f"CausalLM needs model_name_or_path (a pretrained model) or config (training from scratch), got {given}"
            )
        if isinstance(config, dict) and "model_type" not in config:
            raise ValueError(f"config needs the key 'model_type', for example 'llama'; it has {sorted(config)}")
        for name, number in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
            if number < 0:
                raise ValueError(f"{name} must not be negative, got {number}")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}")
        self.save_hyperparameters(ignore=["optimizer"])
        self.model_name_or_path = model_name_or_path
        self.config = config
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.decay = decay
        self.optimizer = optimizer
        self.seed = seed
        self.recompute = recompute
        self.trust_remote_code = trust_remote_code
        self.model: Any = None
        self.val_loss, self.val_perplexity = MeanMetric(), Perplexity()
        self.test_loss, self.test_perplexity = MeanMetric(), Perplexity()

    def setup(self, stage: str) -> None:
        """Check that the data module's tokens and rows are within what the model knows.

        Raises:
            ValueError: The tokenizer has more tokens than the model, or the rows are longer than its positions.
        """
        data, config = getattr(self.trainer, "datamodule", None), self._read_config()
        num_tokens, known_tokens = getattr(data, "num_tokens", None), getattr(config, "vocab_size", None)
        if num_tokens is not None and known_tokens is not None and num_tokens > known_tokens:
            raise ValueError(
                f"the tokenizer has {num_tokens} tokens but the model only {known_tokens}: "
                "give data.tokenizer the tokenizer that belongs to the model"
            )
        length, positions = getattr(data, "sequence_length", None), getattr(config, "max_position_embeddings", None)
        if length is not None and positions is not None and length > positions:
            raise ValueError(
                f"data.sequence_length is {length}, but the model has {positions} positions: lower sequence_length"
            )

    def configure_model(self) -> None:
        """Load or make the model, once. Its dtype is torch's default, which the Trainer's precision sets."""
        if self.model is not None:
            return
        from transformers import AutoModelForCausalLM

        auto_model: Any = AutoModelForCausalLM
        # Said even when it is not trusted: transformers would ask at the terminal, on every rank.
        options = {"dtype": torch.get_default_dtype(), "trust_remote_code": self.trust_remote_code}
        if self.model_name_or_path is not None:
            self.model = auto_model.from_pretrained(self.model_name_or_path, **options)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                self.model = auto_model.from_config(self._read_config(), **options)
        # from_pretrained leaves the model in evaluation mode, and the Trainer keeps the mode it finds.
        self.model.train()
        if self.recompute:
            new_name = hasattr(self.model, "activation_checkpointing_enable")  # from transformers 5.24 on
            enable = "activation_checkpointing_enable" if new_name else "gradient_checkpointing_enable"
            getattr(self.model, enable)()

    def _read_config(self) -> PretrainedConfig:
        from transformers import AutoConfig

        auto_config: Any = AutoConfig
        if isinstance(self.config, dict):
            config = auto_config.for_model(**self.config)
        else:
            name = self.model_name_or_path or self.config
            config = auto_config.from_pretrained(name, trust_remote_code=self.trust_remote_code)
        return cast("PretrainedConfig", config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch, a scalar: the mean over its supervised tokens."""
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add one batch to `val_loss` and `val_perplexity`."""
        self._evaluate(batch, self.val_loss, self.val_perplexity)
        self.log_dict({"val_loss": self.val_loss, "val_perplexity": self.val_perplexity}, prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add one batch to `test_loss` and `test_perplexity`."""
        self._evaluate(batch, self.test_loss, self.test_perplexity)
        self.log_dict({"test_loss": self.test_loss, "test_perplexity": self.test_perplexity})

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The batch's loss and perplexity, scalars of its supervised tokens."""
        loss: Tensor = self.model(**batch).loss.detach()
        return {"loss": loss, "perplexity": loss.exp()}

    def _evaluate(self, batch: dict[str, Tensor], *means: MeanMetric) -> None:
        loss = self.model(**batch).loss.detach()
        # The first column is nobody's target: labels are shifted by one inside the model.
        tokens = (batch["labels"][:, 1:] != IGNORE_INDEX).sum()
        for mean in means:
            mean.update(loss, tokens)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over two groups, with and without weight decay, and the learning rate per optimizer step."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        # Both groups always, even when one is empty: every stage has the same groups, whatever layers it holds.
        groups: list[dict[str, Any]] = [
            {"params": [parameter for parameter in trained if parameter.ndim > 1]},
            {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
        ]
        if self.optimizer is not None:
            optimizer = self.optimizer(groups)
        else:
            optimizer = AdamW(groups, lr=self.learning_rate, weight_decay=self.weight_decay)
        factor = partial(
            learning_rate_factor,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
            decay=self.decay,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the model's configuration in the checkpoint, as plain values."""
        checkpoint[CONFIG_KEY] = self.model.config.to_dict()
