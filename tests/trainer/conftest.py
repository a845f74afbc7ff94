"""Tiny random models, and a drafter that is as slow and as plain as its definition."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from osprey_trainer.batch import DialogueBatch
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.models.draft import Arrangement, Drafter
from osprey_trainer.models.hf_names import read_config, read_embedding
from osprey_trainer.models.target import Target
from osprey_trainer.vocabulary import Alignment

VOCAB = 64


def tiny_model(folder: Path, *, layers: int, hidden: int, seed: int, family: str = "llama", **options) -> Path:
    """A random model whose every weight matters: norms are not ones, biases not zeros."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        **options,
    }
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or "bias" in name:
                value.add_(torch.rand_like(value))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_model():
    return tiny_model


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("target"), layers=7, hidden=24, seed=1)


@pytest.fixture(scope="session")
def source_folder(tmp_path_factory):
    """The small language model that backbones are cut from; wider than the target."""
    return tiny_model(tmp_path_factory.mktemp("source"), layers=5, hidden=32, seed=2, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def target(target_folder):
    return Target(target_folder)


def same_vocabulary(rows: int = VOCAB) -> Alignment:
    return Alignment(sources=tuple((row,) for row in range(rows)), copied=rows, composed=0, left=0)


@pytest.fixture
def osprey(source_folder, target_config):
    def make(layers: int, source: Path = source_folder) -> Drafter:
        return Drafter.from_backbone(
            Backbone.prune(source, layers),
            same_vocabulary(),
            target_config=target_config,
            tapped_layers=(2, 3, 4),
        )

    return make


@pytest.fixture(scope="session")
def target_config(target_folder):
    return read_config(target_folder)


@pytest.fixture
def trained(osprey, target_config, target_folder):
    """Drafters whose every weight matters, as after training."""

    def make(arrangement: str, layers: int = 2, **source: Path) -> Drafter:
        if arrangement == "osprey":
            drafter = osprey(layers, **source)
        else:
            drafter = Drafter.from_scratch(
                target_config=target_config,
                target_embedding=read_embedding(target_folder),
                tapped_layers=(2, 3, 4),
                seed=5,
            )
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return drafter.eval()

    return make


@pytest.fixture
def dialogues(target):
    def make(*shape: tuple[int, int], seed: int = 3) -> DialogueBatch:
        """Shape: (prompt tokens, answer tokens) of each dialogue."""
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(VOCAB, (prompt + answer,), generator=generator) for prompt, answer in shape]
        return DialogueBatch.collate(
            ids=ids,
            answer=[torch.arange(p + a) >= p for p, a in shape],
            states=[_one(target, x) for x in ids],
            names=[f"d{i}" for i in range(len(shape))],
        )

    return make


def _one(target, ids):
    states = target.states(ids[None])
    return type(states)(states.taps[0], states.last_hidden[0])


class SlowDrafter:
    """One row at a time over growing lists of keys and values, head by head, in float64.

    Shares no code with the package: it reads weights by their published names.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.weights = {name: x.double() if x.is_floating_point() else x for name, x in drafter.state_dict().items()}
        self.body = drafter.config.body
        self.osprey = drafter.config.arrangement is Arrangement.OSPREY

    def chain(
        self, ids: Tensor, taps: Tensor, row: int, steps: int, choose: Callable[[int, Tensor], int]
    ) -> list[Tensor]:
        """Drafts from row `row`: x_1..x_{row+1} and the taps of 0..row are known.

        choose(k, normed) gives the token that step k + 1 takes in. Returns the normed output of each step.
        """
        caches = [([], []) for _ in range(self.body.num_layers)]
        for i in range(row + 1):
            stream = self._row(int(ids[i + 1]), self.weights["fc.weight"] @ taps[i].double(), i, caches)
        outputs = [self._norm(stream, "norm.weight")]
        for k in range(1, steps):
            stream = self._row(choose(k - 1, outputs[-1]), stream, row + k, caches)
            outputs.append(self._norm(stream, "norm.weight"))
        return outputs

    def token(self, normed: Tensor) -> int:
        draft = int((self.weights["lm_head.weight"] @ normed).argmax())
        return draft + int(self.weights["d2t"][draft])

    def _row(self, token: int, context: Tensor, position: int, caches) -> Tensor:
        embedding = self.weights["embed_tokens.weight"][token]
        first, stream = (context, embedding) if self.osprey else (embedding, context)
        for layer, (keys, values) in enumerate(caches):
            p = f"layers.{layer}."
            x = torch.cat(
                [
                    self._norm(first, p + "input_layernorm.weight"),
                    self._norm(stream, p + "hidden_norm.weight"),
                ]
            )
            query = self._heads(p + "self_attn.q", x, position)
            keys.append(self._heads(p + "self_attn.k", x, position))
            values.append(self._heads(p + "self_attn.v", x, None))
            mixed = []
            for head, q in enumerate(query):
                shared = head // (self.body.num_heads // self.body.num_kv_heads)
                scores = torch.stack([q @ key[shared] for key in keys]) / math.sqrt(self.body.head_dim)
                mixed.append(scores.softmax(0) @ torch.stack([value[shared] for value in values]))
            stream = stream + self.weights[p + "self_attn.o_proj.weight"] @ torch.cat(mixed)
            x = self._norm(stream, p + "post_attention_layernorm.weight")
            gate = self.weights[p + "mlp.gate_proj.weight"] @ x
            up = self.weights[p + "mlp.up_proj.weight"] @ x
            stream = stream + self.weights[p + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        return stream

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.body.rms_norm_eps).sqrt() * self.weights[name]

    def _heads(self, name: str, x: Tensor, position: int | None) -> list[Tensor]:
        projected = self.weights[f"{name}_proj.weight"] @ x + self.weights.get(f"{name}_proj.bias", 0)
        heads = list(projected.split(self.body.head_dim))
        if f"{name}_norm.weight" in self.weights:
            heads = [self._norm(head, f"{name}_norm.weight") for head in heads]
        return heads if position is None else [self._turn(head, position) for head in heads]

    def _turn(self, head: Tensor, position: int) -> Tensor:
        half = self.body.head_dim // 2
        turned = head.clone()
        for d in range(half):
            angle = position * self.body.rope["rope_theta"] ** (-d / half)
            turned[d] = head[d] * math.cos(angle) - head[d + half] * math.sin(angle)
            turned[d + half] = head[d + half] * math.cos(angle) + head[d] * math.sin(angle)
        return turned


@pytest.fixture
def slow_drafter():
    return SlowDrafter
