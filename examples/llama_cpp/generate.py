"""Generate with llama.cpp, and record which experts it routes to, in a CSV that `stickymoe trace convert` reads.

    python -m examples.llama_cpp.generate --gguf model.gguf --model FOLDER --prompt "What is HTML?" --trace route.csv

Needs llama-cpp-python and tokenizers. Greedy decoding, one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np

CHOICE, WEIGHTS = "ffn_moe_topk-", ("ffn_moe_weights_norm-", "ffn_moe_weights-")


class Tensor(ctypes.Structure):
    """The first fields of `ggml_tensor` (ggml.h)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


class Routes:
    """What the graph computed for each layer of the last pass: experts [tokens, k] and their weights."""

    def __init__(self) -> None:
        folder = Path(ll.__file__).parent / "lib"
        self._ggml = ctypes.CDLL(str(next(folder.glob("libggml-base*"))))
        self._ggml.ggml_get_name.restype = ctypes.c_char_p
        self._ggml.ggml_get_name.argtypes = [ctypes.c_void_p]
        self._ggml.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2
        self.experts: dict[int, np.ndarray] = {}
        self.weights: dict[int, np.ndarray] = {}
        self.callback = ll.ggml_backend_sched_eval_callback(self._seen)

    def clear(self) -> None:
        self.experts, self.weights = {}, {}

    def _seen(self, tensor: int, ask: bool, _: Any) -> bool:
        """llama.cpp asks whether a tensor is wanted, and shows it when it is computed."""
        name = self._ggml.ggml_get_name(tensor).decode()
        wanted = name.startswith((CHOICE, *WEIGHTS)) and name.rpartition("-")[2].isdecimal()
        if wanted and not ask:
            layer = int(name.rpartition("-")[2])
            if name.startswith(CHOICE):
                self.experts[layer] = self._rows(tensor, np.int32)
            else:  # the normalised weights come after the others and replace them
                self.weights[layer] = self._rows(tensor, np.float32)
        return wanted if ask else True

    def _rows(self, address: int, dtype: type) -> np.ndarray:
        """The tensor as [tokens, k]; a row may lie in a wider one, as the top-k of a sort does."""
        t = Tensor.from_address(address)
        # Weights are [1, k, tokens], experts [k, tokens].
        width, count, stride = (t.ne[1], t.ne[2], t.nb[2]) if t.ne[0] == 1 else (t.ne[0], t.ne[1], t.nb[1])
        out = np.empty((count, width), dtype)
        for i in range(count):
            row = out[i]
            self._ggml.ggml_backend_tensor_get(address, row.ctypes.data, i * stride, row.nbytes)
        return out


class Model:
    """A GGUF file in llama.cpp, on one thread, whose routing is seen."""

    def __init__(self, file: Path, *, context: int) -> None:
        ll.llama_log_set(_silent, None)
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(str(file).encode(), ll.llama_model_default_params())
        if not self.model:
            sys.exit(f"{file} cannot be read by llama.cpp: expected a GGUF file.")
        self.routes = Routes()
        settings = ll.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = context
        settings.n_threads = settings.n_threads_batch = 1
        settings.cb_eval = self.routes.callback
        self.context = ll.llama_init_from_model(self.model, settings)
        self.vocab = ll.llama_model_get_vocab(self.model)
        self.vocab_size = ll.llama_vocab_n_tokens(self.vocab)

    def append(self, tokens: Sequence[int]) -> np.ndarray:
        """Run more tokens; returns the logits after the last one."""
        self.routes.clear()
        array = (ll.llama_token * len(tokens))(*tokens)  # the batch only points to it
        if ll.llama_decode(self.context, ll.llama_batch_get_one(array, len(tokens))):
            sys.exit("llama.cpp could not run the tokens: is the context too short?")
        return np.ctypeslib.as_array(ll.llama_get_logits_ith(self.context, -1), (self.vocab_size,)).copy()

    def fact(self, key: str) -> str:
        out = ctypes.create_string_buffer(256)
        ll.llama_model_meta_val_str(self.model, key.encode(), out, len(out))
        return out.value.decode()


@ll.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    """llama.cpp's own messages are not shown."""


def generate(model: Model, prompt: Sequence[int], n_tokens: int) -> tuple[list[int], list[str]]:
    """Greedy tokens, and a row of the trace for every expert that a token used."""
    tokens, rows, step = [], [], 0
    logits = model.append(prompt)
    for phase in [0, *[1] * (n_tokens - 1)]:
        step = _trace(rows, model.routes, phase, step)
        tokens.append(int(logits.argmax()))
        if ll.llama_vocab_is_eog(model.vocab, tokens[-1]):
            break
        if len(tokens) < n_tokens:
            logits = model.append(tokens[-1:])
    return tokens, rows


def _trace(rows: list[str], routes: Routes, phase: int, step: int) -> int:
    """Add the routes of a pass; returns the step after it. The last layer routes only the last token of a prompt."""
    count = max(len(experts) for experts in routes.experts.values())
    for layer, experts in sorted(routes.experts.items()):
        first = step + count - len(experts)
        for i, (chosen, weights) in enumerate(zip(experts, routes.weights[layer], strict=True)):
            pairs = enumerate(zip(chosen, weights, strict=True))
            rows += [f"0,{phase},{first + i},{layer},{slot},{e},{w:.6f}" for slot, (e, w) in pairs]
    return step + count


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate with llama.cpp and record its routing.")
    parser.add_argument("--gguf", type=Path, required=True, help="the model")
    parser.add_argument("--model", type=Path, required=True, help="the same model for transformers; its tokenizer")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate (default 32)")
    parser.add_argument("--trace", type=Path, help="CSV to write")
    parser.add_argument("--json", type=Path, help="tokens and text to write")
    args = parser.parse_args()

    from tokenizers import Tokenizer as Text

    text = Text.from_file(str(args.model / "tokenizer.json"))
    prompt = text.encode(args.prompt, add_special_tokens=False).ids
    model = Model(args.gguf, context=len(prompt) + args.tokens)
    tokens, rows = generate(model, prompt, args.tokens)
    written = text.decode(tokens)
    print(written)
    if args.trace is not None:
        arch = model.fact("general.architecture")
        n_experts, k = model.fact(f"{arch}.expert_count"), model.fact(f"{arch}.expert_used_count")
        head = ["# route_trace v1", f"# model={args.gguf.name} arch={arch} n_expert={n_experts} n_expert_used={k}"]
        args.trace.write_text("\n".join([*head, "turn,phase,step,layer,slot,expert,weight", *rows]) + "\n")
    if args.json is not None:
        args.json.write_text(json.dumps({"prompt": prompt, "tokens": tokens, "text": written}, indent=1) + "\n")


if __name__ == "__main__":
    main()
