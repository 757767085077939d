"""Models of random weights in the shapes of real ones, pools that hold numbers, and rows over them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.batch import UNKNOWN_TOKEN, Batch, DecodePlan, Row, TokenClass
from worker.kv.storage import KvStorage
from worker.model.config import LlamaConfig
from worker.model.llama import LlamaModel
from worker.params import Sampling
from worker.sampling import Draw

BLOCK_SIZE = 16
MAX_CONTEXT = 32 * 1024 + 512
TINYLLAMA = LlamaConfig(
    num_layers=22,
    hidden_size=2048,
    intermediate_size=5632,
    num_heads=32,
    num_kv_heads=4,
    head_size=64,
    vocab_size=32000,
    max_context_tokens=MAX_CONTEXT,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
)
LLAMA3 = LlamaConfig(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    vocab_size=128256,
    max_context_tokens=MAX_CONTEXT,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
)
TINY = LlamaConfig(
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    vocab_size=160,
    max_context_tokens=512,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
)
"""What an interpreter computes in seconds."""
SHALLOW = replace(TINYLLAMA, num_layers=2, max_context_tokens=4096)
"""The shapes of TinyLlama, without its depth: for what must be equal, not fast."""


def matrix_shapes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of all matrices, by GGUF name; the embedding and the head are two."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    of_layer = {
        "attn_q": (q_width, hidden),
        "attn_k": (kv_width, hidden),
        "attn_v": (kv_width, hidden),
        "attn_output": (hidden, q_width),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    shapes = {"token_embd.weight": (config.vocab_size, hidden), "output.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def random_llama(
    config: LlamaConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> LlamaModel:
    """A model whose activations stay of the size of one, so that logits are numbers that differ.

    Args:
        config: Sizes.
        dtype: Of matrices; norms are float32.
        device: Where it is made; `meta` gives shapes only.
        seed: Same seed, same weights on one kind of device.
    """
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in matrix_shapes(config).items():
        matrix = torch.empty(shape, dtype=dtype, device=device)
        tensors[name] = matrix.normal_(0.0, shape[1] ** -0.5, generator=generator)
    norms = [
        f"blk.{layer}.{name}" for layer in range(config.num_layers) for name in ("attn_norm", "ffn_norm")
    ]
    for name in (*norms, "output_norm"):
        tensors[f"{name}.weight"] = torch.ones(config.hidden_size, device=device)
    return LlamaModel(config, tensors, device=device)


def random_pool(
    config: LlamaConfig, num_blocks: int, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> KvStorage:
    """A pool as Triton's kernels want it, its blocks full of numbers."""
    kv = KvStorage(
        num_blocks=num_blocks,
        num_layers=config.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=dtype,
        keys_across=False,
        device=device,
    )
    if device.type != "meta":
        # In pieces: drawing must not take the size of the pool again.
        generator = torch.Generator(device).manual_seed(seed)
        for start in range(0, num_blocks, 4096):
            kv.data[start : start + 4096].normal_(0.0, 0.5, generator=generator)
    return kv


def block_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """Size of a block of `random_pool`."""
    return KvStorage.block_bytes(
        num_layers=config.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=dtype,
    )


def scattered(num_tables: int, num_tokens: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    """Tables of blocks in no order, of a pool that they fill."""
    each = -(-num_tokens // BLOCK_SIZE)
    blocks = list(range(num_tables * each))
    random.Random(seed).shuffle(blocks)  # noqa: S311 - no secret
    return [tuple(blocks[start : start + each]) for start in range(0, len(blocks), each)]


@dataclass(frozen=True, slots=True)
class Step:
    """A batch of one class and a greedy draw after each row."""

    batch: Batch
    draws: tuple[Draw, ...]


GREEDY = Sampling(temperature=0.0)


def decode_steps(
    tables: Sequence[tuple[int, ...]], context: int, count: int, *, plan: DecodePlan = DecodePlan.PLAN_ONCE
) -> list[Step]:
    """Steps of one token a row up to `context`; from the second on a token is what the one before drew."""
    steps = []
    for number in range(count):
        position = context - count + number
        rows = tuple(
            Row(
                session_id=str(at),
                token_ids=(UNKNOWN_TOKEN if number else 1 + at % 7,),
                position=position,
                block_table=table,
                wants_logits=True,
                plan=plan,
                token_class=TokenClass.DECODE,
            )
            for at, table in enumerate(tables)
        )
        draw = Draw(GREEDY, range(position + 1), 0, frozenset())
        steps.append(Step(Batch(rows), (draw,) * len(rows)))
    return steps


def prefill_step(
    table: tuple[int, ...], ids: Sequence[int], position: int = 0, *, session: str = "p"
) -> Step:
    """One row of input tokens that wants a draw after its last."""
    row = Row(
        session_id=session,
        token_ids=tuple(ids),
        position=position,
        block_table=table,
        wants_logits=True,
        plan=DecodePlan.PLAN_ONCE,
        token_class=TokenClass.PREFILL,
    )
    return Step(Batch((row,)), (Draw(GREEDY, range(position + len(ids)), 0, frozenset()),))
