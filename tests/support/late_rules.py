"""Models with a made-up rule that begins at a position or at a length, made by changing the source of mlx-lm's llama.

Each rule is right in plain mlx-lm: it is written for a cache that holds one sequence (its offset is a number), and most
also for one that holds the rows of a batch. The number at which it begins is a constant in the file or a field of the
configuration, under a name that nobody knows.
"""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from workbench import Engine, EngineConfig, SamplingParams
from workbench.models.load import LoadedModel
from workbench.models.packed.pack_model import pack_model
from workbench.models.preflight import UnsupportedModelError

VOCAB_SIZE = 260
QUERIES = "        output = scaled_dot_product_attention(\n"
AFTER_ROPE = "            keys = self.rope(keys, offset=cache.offset)\n"
OUTPUT = "        output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)\n"
MLP = "        r = self.mlp(self.post_attention_layernorm(h))\n"
RESIDUAL = "        out = h + r\n        return out\n"
LOGITS = "        return out\n\n    def sanitize"
NEW_KEYS = "            keys, values = cache.update_and_fetch(keys, values)\n"

HELPERS = """

def _where(cache, length):
    offset = cache.offset if cache is not None else 0
    if isinstance(offset, mx.array) and offset.ndim > 0:
        offset = offset[:, None]
        return offset + mx.arange(length)
    return (offset + mx.arange(length))[None]


def _late(cache, length, first, factor):
    position = _where(cache, length)
    return mx.where(position >= first, factor, 1.0)


def _growing(cache, length, first, factor):
    return 1 + (factor - 1) * mx.log(1 + mx.floor(_where(cache, length) / first))

"""

BY_POSITION = {
    "query scale": (QUERIES, "        queries = queries * {rule}[:, None, :, None]\n{place}"),
    "key scale": (NEW_KEYS, "            keys = keys * {rule}[:, None, :, None]\n{place}"),
    "value scale": (NEW_KEYS, "            values = values * {rule}[:, None, :, None]\n{place}"),
    "attention scale": (OUTPUT, "        output = output * {rule}[:, None, :, None]\n{place}"),
    "query bias": (QUERIES, "        queries = queries + ({rule}[:, None, :, None] - 1)\n{place}"),
    "rope base": (
        AFTER_ROPE,
        "{place}            far = {rule}[:, None, :, None] != 1\n"
        "            other = mx.fast.rope(self.k_before, self.head_dim, traditional=False, base=500.0, scale=1.0,"
        " offset=cache.offset)\n            keys = mx.where(far, other, keys)\n",
    ),
    "mlp scale": (MLP, "{place}        r = r * {rule_x}[..., None]\n"),
    "residual scale": (RESIDUAL, "        h = h * {rule_x}[..., None]\n{place}"),
    "logits scale": (LOGITS, "        out = out * {rule_logits}[..., None]\n{place}"),
}
"""Rules by positions: the line of the file before which each stands, and its own lines."""

BY_LENGTH = {
    "temperature": (QUERIES, "        queries = queries * ({factor} if {longer} else 1.0)\n{place}"),
    "value scale": (QUERIES, "        values = values * ({factor} if {longer} else 1.0)\n{place}"),
    "attention scale": (OUTPUT, "        output = output * ({factor} if {longer} else 1.0)\n{place}"),
    "output bias": (OUTPUT, "        output = output + (0.1 * {factor} if {longer} else 0.0)\n{place}"),
    "mask bias": (
        QUERIES,
        "        if {longer}:\n"
        "            rows = mx.arange(keys.shape[2] - L, keys.shape[2])[:, None]\n"
        "            columns = mx.arange(keys.shape[2])[None]\n"
        "            mask = mx.where(columns <= rows, -0.01 * {factor} * (rows - columns), -1e9)\n{place}",
    ),
}
LONGER = {
    "keys": "keys.shape[2] >= {first}",
    "offset": "(cache is not None and cache.offset + L >= {first})",
    "input": "x.shape[1] >= {first}",
}


@dataclass(frozen=True)
class Mutant:
    """A made-up rule.

    Attributes:
        form: The part of the model that it changes.
        begins: Its condition: "position", "growing", "keys", "offset" or "input".
        first: The position or the length at which it begins.
        factor: Size of the change.
        place: The place of its number: "constant", "module", "field" or "nested".
        layer: The only layer that it changes; None for all.
        max_position: Positions of the model.
    """

    form: str
    begins: str
    first: int
    factor: float
    place: str
    layer: int | None
    max_position: int

    def __str__(self) -> str:
        layers = "all layers" if self.layer is None else f"layer {self.layer}"
        return (
            f"{self.form} x {self.factor}, by {self.begins} from {self.first} of {self.max_position}, "
            f"{self.place}, {layers}"
        )


def draw(generator: np.random.Generator, largest: int = 2048) -> Mutant:
    """A random rule of a model with no more positions than this."""
    by_length = generator.random() < 0.35
    begins = str(generator.choice(list(LONGER) if by_length else ["position", "position", "growing"]))
    forms = BY_LENGTH if by_length else BY_POSITION
    form = str(generator.choice(list(forms)))
    max_position = int(generator.choice([size for size in (256, 512, 1024, 2048) if size <= largest]))
    first = int(np.exp(generator.uniform(np.log(9), np.log(max_position - 16))))
    places = ["constant", "module", "field", "nested"]
    layer = int(generator.integers(4)) if generator.random() < 0.3 and form not in ("logits scale",) else None
    factor = round(float(generator.uniform(1.05, 1.6)), 2)
    return Mutant(form, begins, first, factor, str(generator.choice(places)), layer, max_position)


def make(mutant: Mutant | None, seed: int, name: str, max_position: int = 512) -> LoadedModel:
    """A tiny model with a rule, or without one, its weights packed."""
    if mutant is not None:
        max_position = mutant.max_position
    module = types.ModuleType(f"mlx_lm.models.{name}")
    source = inspect.getsource(llama) if mutant is None else _changed(inspect.getsource(llama), mutant)
    sys.modules[module.__name__] = module
    module.__package__ = "mlx_lm.models"
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    fields = {
        "model_type": name,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
    }
    if mutant is not None and mutant.place == "field":
        fields["zeta_begin"] = mutant.first
    if mutant is not None and mutant.place == "nested":
        fields["rope_scaling"] = {"type": "default", "zeta": {"begin": mutant.first}}
    model = module.Model(module.ModelArgs.from_dict(fields))
    generator = np.random.default_rng(seed)

    def weight(path: str, old: mx.array) -> mx.array:
        noise = generator.standard_normal(old.shape)
        return mx.array((1 + 0.2 * noise if old.ndim < 2 else 2 * noise / old.shape[-1] ** 0.5).astype(np.float32))

    model.update(tree_map_with_path(weight, model.parameters()))
    mx.eval(model.parameters())
    pack_model(model)
    return LoadedModel(
        model=model,
        tokenizer=None,
        name=name,
        architecture=name,
        max_position=max_position,
        eos_token_ids=frozenset(),
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        num_parameters=sum(array.size for _, array in tree_flatten(model.parameters())),
        source="random",
    )


def _changed(source: str, mutant: Mutant) -> str:
    """The source with the rule in it."""
    first = {
        "constant": str(mutant.first),
        "module": "_ZETA",
        "field": "self.args.zeta_begin",
        "nested": 'self.args.rope_scaling["zeta"]["begin"]',
    }[mutant.place]
    factor = (
        str(mutant.factor) if mutant.layer is None else f"({mutant.factor} if self.number == {mutant.layer} else 1.0)"
    )
    if mutant.begins in LONGER:
        place, text = BY_LENGTH[mutant.form]
        longer = LONGER[mutant.begins].format(first=first)
        if mutant.form == "mask bias" and mutant.layer is not None:
            longer = f"({longer} and self.number == {mutant.layer})"
        text = text.format(longer=longer, factor=factor, place=place)
    else:
        place, text = BY_POSITION[mutant.form]
        rule = "_growing" if mutant.begins == "growing" else "_late"
        text = text.format(
            rule=f"{rule}(cache, L, {first}, {factor})",
            rule_x=f"{rule}(cache, x.shape[1], {first}, {factor})",
            rule_logits=f"{rule}(position, inputs.shape[1], {first}, {mutant.factor})",
            place=place,
        )
    assert source.count(place) == 1, (place, source.count(place))
    changed = source.replace(place, text)
    if mutant.form == "logits scale":  # the offset before the pass
        begin = "        out = self.model(inputs, cache, input_embeddings)\n"
        position = (
            "        import types\n"
            "        offset = cache[0].offset if cache is not None else 0\n"
            "        position = types.SimpleNamespace(offset=offset)\n"
        )
        changed = changed.replace(begin, position + begin)
    if mutant.form in ("mlp scale", "residual scale"):
        # The cache has moved on behind the attention of its layer.
        begin = "        r = self.self_attn(self.input_layernorm(x), mask, cache)\n"
        before = (
            "        import types\n"
            "        past = cache\n"
            "        cache = types.SimpleNamespace(offset=past.offset if past is not None else 0)\n"
        )
        changed = changed.replace(begin, before + begin.replace("mask, cache", "mask, past"))
    elif mutant.begins not in LONGER and mutant.form != "logits scale":
        begin = "        B, L, D = x.shape\n\n        queries"
        before = (
            "        import types\n"
            "        B, L, D = x.shape\n        past = cache\n"
            "        cache = types.SimpleNamespace(offset=past.offset if past is not None else 0)\n\n        queries"
        )
        changed = changed.replace(begin, before)
        changed = changed.replace("cache.update_and_fetch", "past.update_and_fetch")
        changed = changed.replace("keys, values, cache=cache, scale", "keys, values, cache=past, scale")
        changed = changed.replace(
            "if cache is not None:\n            queries", "if past is not None:\n            queries"
        )
        changed = changed.replace(
            "            queries = self.rope(queries, off",
            "            self.k_before = keys\n            queries = self.rope(queries, off",
        )
    elif mutant.begins == "offset":
        begin = "        B, L, D = x.shape\n\n        queries"
        changed = changed.replace("        output = scaled", "        output = scaled")
        changed = changed.replace(begin, begin)
    if mutant.begins == "offset":  # update_and_fetch has moved the offset already
        changed = changed.replace("cache.offset + L >=", "cache.offset >=")
    changed = changed.replace(
        "        self.args = args\n        self.model_type",
        "        self.args = args\n        for number, layer in enumerate(()): pass\n        self.model_type",
    )
    changed = changed.replace(
        "        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)\n        self.fa_idx",
        "        for number, layer in enumerate(self.layers):\n"
        "            layer.number = layer.self_attn.number = number\n"
        "        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)\n        self.fa_idx",
    )
    changed = changed.replace(
        "        dim = args.hidden_size\n        self.n_heads",
        "        dim = args.hidden_size\n        self.args = args\n        self.n_heads",
    )
    changed = changed.replace(
        "    sliding_window: Optional[int] = None\n\n    def __post",
        "    sliding_window: Optional[int] = None\n    zeta_begin: int = 0\n\n    def __post",
    )
    return changed.replace("\n\n@dataclass\n", f"\n\n_ZETA = {mutant.first}\n{HELPERS}\n@dataclass\n", 1)


def judge(loaded: LoadedModel, seed: int = 0) -> tuple[str, str]:
    """Serve a model far beyond its rule: "refused", "right" or "wrong", and the way that it was served."""
    length = loaded.max_position - 8
    prompt = np.random.default_rng(seed).integers(1, VOCAB_SIZE, length).tolist()
    entries = make_prompt_cache(loaded.model)
    expected = [np.array(loaded.model(mx.array([prompt]), cache=entries)[0, -1].astype(mx.float32))]
    tokens = [int(expected[0].argmax())]
    for _ in range(3):
        expected.append(np.array(loaded.model(mx.array([tokens[-1:]]), cache=entries)[0, -1].astype(mx.float32)))
        tokens.append(int(expected[-1].argmax()))
    try:
        engine = Engine(loaded, EngineConfig(block_size=16, num_blocks=-(-loaded.max_position // 16) + 2))
    except UnsupportedModelError as reason:
        return "refused", str(reason)
    way = engine.describe()["forward"]
    try:
        engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1))
        (output,) = engine.run(progress=False)
    finally:
        engine.close()
    logprobs = [logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max() for logits in expected]
    is_right = list(output.token_ids) == tokens and all(
        abs(logprob[token] - given[token]) < 1e-2 for token, logprob, given in zip(tokens, logprobs, output.logprobs)
    )
    return "right" if is_right else "wrong", way
