"""Open a trained model for packing: read its experts one by one, and everything else tensor by tensor.

A run of ours has stacks of experts. A folder of transformers has one tensor per expert and matrix, or stacks, and other
names than the model: its own conversions are applied, to the tensors of one expert at a time. Quantised weights are
dequantised by them.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stickymoe.errors import DataError, RunError
from stickymoe.models.gpt import GPT, Block
from stickymoe.models.moe import Experts, MoE
from stickymoe.reading import read_text, reason
from stickymoe.routing.lookup import Lookup, NgramTable
from stickymoe.runs.folder import RunFolder
from stickymoe.runs.settings import read_config
from stickymoe.runtime.formats import ExpertSpec, TensorSpec
from stickymoe.runtime.rows import RowGroup, TableRows, grouped
from stickymoe.runtime.tensors import Entry, find_entries, fingerprint
from stickymoe.training.build import build_model
from stickymoe.training.checkpoint import find_checkpoint


class Checkpoint(ABC):
    """A trained model on disk.

    kind: "run" for a run of ours, "transformers" for a folder of transformers
    name: of its folder
    spec: the tensors of every expert
    n_layers: layers that have experts; layers that share their experts count as one
    n_experts: experts of each of these layers
    top_k: experts that a token uses
    layers_per_pool: adjacent layers of the model that share their experts
    fingerprint: a hash that changes with the weights or the settings
    rows: groups of rows in tables that stay in slow memory
    """

    kind: str
    name: str
    spec: ExpertSpec
    n_layers: int
    n_experts: int
    top_k: int
    layers_per_pool: int = 1
    fingerprint: str
    rows: tuple[RowGroup, ...] = ()

    @abstractmethod
    def expert(self, layer: int, e: int) -> list[Tensor]:
        """The tensors of `spec` of one expert, in the type in which they are saved."""

    @abstractmethod
    def dense(self) -> Iterator[tuple[str, Tensor]]:
        """Every other tensor with its name in the state of the model, in the type in which it is saved.

        Without the tables of `rows`.
        """

    def table_rows(self, name: str, first: int, stop: int) -> Tensor:
        """Rows of a table."""
        raise DataError(f"{self.name} has no table {name!r}.")

    @abstractmethod
    def copy_config(self, folder: Path) -> None:
        """Copy everything but weights that running the model needs: config, tokenizer, chat template."""

    def _require_expert(self, layer: int, e: int) -> None:
        if not (0 <= layer < self.n_layers and 0 <= e < self.n_experts):
            expected = f"layer < {self.n_layers} and expert < {self.n_experts}"
            raise DataError(f"{self.name}: got layer {layer} and expert {e}, expected {expected}.")


def open_checkpoint(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run, or the model of a folder of transformers."""
    if RunFolder(folder).config.is_file():
        return RunCheckpoint(folder)
    if (folder / "config.json").is_file():
        from stickymoe.runtime.foreign_checkpoints import TransformersCheckpoint  # needs transformers

        return TransformersCheckpoint(folder)
    raise RunError(
        f"{folder} has neither config.yaml nor config.json: expected the folder of a run, or of a transformers model."
    )


def gpt_expert(experts: Experts) -> ExpertSpec:
    """What a store holds of an expert of our GPT: its matrices, then its biases."""
    stacks = sorted(experts.stacks().items(), key=lambda item: -item[1].dim())
    tensors = (TensorSpec(name, tuple(stack.shape[1:])) for name, stack in stacks)
    return ExpertSpec(tuple(tensors), "gelu", gated=False)


class RunCheckpoint(Checkpoint):
    """The newest complete checkpoint of a run."""

    kind = "run"

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)
        config = read_config(file=self._folder.config)
        chosen = find_checkpoint(self._folder.checkpoints)
        if chosen is None:
            raise RunError(f"{folder} has no checkpoint to pack: resume or repeat the run first.")
        self._entries = find_entries(chosen)
        c = config.model
        self.name = folder.resolve().name
        self.layers_per_pool = c.layers_per_pool
        self.n_layers, self.n_experts, self.top_k = c.n_layers // c.layers_per_pool, c.pool_size, c.top_k
        if not any(".ffn.experts." in name for name in self._entries):
            raise RunError(f"{folder} has no experts: its variant is {config.variant.name}, a dense model.")
        with torch.device("meta"):
            model = build_model(config, self._entries["token_embedding.weight"].shape[0])
        self.spec = next(gpt_expert(block.ffn.experts) for block in model.blocks if isinstance(block.ffn, MoE))
        # The first layer of a pool owns its experts.
        self._stacks = [
            [self._stack(i * c.layers_per_pool, t, chosen) for t in self.spec.tensors] for i in range(self.n_layers)
        ]
        self.fingerprint = fingerprint(self._entries, read_text(self._folder.config, RunError))
        self.rows = grouped(list(self._addressed(model, chosen)))
        self._tables = {table.name for group in self.rows for table in group.tables}

    def _addressed(self, model: GPT, checkpoint: Path) -> Iterator[tuple[int, int, int, TableRows]]:
        """How every table is addressed (n, salt and rows), and where its rows are. Each head has a salt of its own."""
        for layer, block in enumerate(model.blocks):
            if not isinstance(block, Block) or type(block.side) is not Lookup:
                continue
            side, begin = block.side, f"blocks.{layer}.side"
            if side.tokens is not None:
                tokens = TableRows(f"{begin}.tokens.weight", layer, 0, side.tokens.embedding_dim)
                yield 1, 0, side.tokens.num_embeddings, tokens
            for i, ngram in enumerate(side.ngrams):
                assert isinstance(ngram, NgramTable)
                name, width = f"{begin}.ngrams.{i}.table.weight", ngram.table.embedding_dim
                entry, salts = self._entries.get(name), self._entries.get(f"{begin}.ngrams.{i}.salts")
                if entry is None or salts is None or entry.shape != (ngram.table.num_embeddings, width):
                    raise RunError(f"Checkpoint {checkpoint} does not fit the config of its run ({name}).")
                for head, salt in enumerate(salts.read().tolist()):
                    yield ngram.n, salt, ngram.rows, TableRows(name, layer, head * ngram.rows, width)

    def _stack(self, block: int, tensor: TensorSpec, checkpoint: Path) -> Entry:
        entry = self._entries.get(f"blocks.{block}.ffn.experts.{tensor.name}")
        if entry is None or entry.shape != (self.n_experts, *tensor.shape):
            raise RunError(f"Checkpoint {checkpoint} does not fit the config of its run (experts of block {block}).")
        return entry

    def expert(self, layer: int, e: int) -> list[Tensor]:
        self._require_expert(layer, e)
        return [stack.row(e)[0] for stack in self._stacks[layer]]

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        experts = tuple(f".ffn.experts.{tensor.name}" for tensor in self.spec.tensors)  # without their bases
        for name, entry in self._entries.items():
            if not name.endswith(experts) and name not in self._tables:
                yield name, entry.read()

    def table_rows(self, name: str, first: int, stop: int) -> Tensor:
        return self._entries[name].rows(first, stop)

    def copy_config(self, folder: Path) -> None:
        for file in (self._folder.config, self._folder.tokenizer):
            copy_file(file, folder)


def copy_file(file: Path, folder: Path) -> None:
    """Copy a file into a folder, which is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.name)
    except OSError as e:
        raise DataError(f"{file} cannot be copied to {folder} ({reason(e)}).") from e
