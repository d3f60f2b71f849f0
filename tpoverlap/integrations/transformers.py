"""Tensors of a Hugging Face Llama checkpoint into tensor-parallel layers, and back. Needs no ``transformers``.

===============================================  ==================================================================
checkpoint, ``model.layers.N.``                  `TransformerLayer` number N
===============================================  ==================================================================
``input_layernorm.weight``                       ``self_attention.layernorm_qkv.layer_norm_weight``
``self_attn.{q,k,v}_proj.weight``                ``self_attention.layernorm_qkv.weight``, group by group
``self_attn.o_proj.weight``                      ``self_attention.proj.weight``
``post_attention_layernorm.weight``              ``layernorm_mlp.layer_norm_weight``
``mlp.{gate,up}_proj.weight``                    ``layernorm_mlp.fc1_weight``, gate's rows first
``mlp.down_proj.weight``                         ``layernorm_mlp.fc2_weight``
``model.embed_tokens.weight``                    the embedding's ``weight``
``model.norm.weight``                            a plain replicated parameter [H]
``lm_head.weight``                               the head's ``weight``; not there where it is the embedding's
===============================================  ==================================================================

Both turn feature i of a head together with feature i + d/2 (RoPE), so no rows are permuted. (Meta's own files turn
neighbours: convert those to Hugging Face's format first.) Files: ``safetensors.torch.load_file`` of each shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.nn import TransformerLayer, VocabParallelEmbedding, VocabParallelHead, full_weight, load_full_weight
from tpoverlap.nn.full_weights import cut_parameter

LLAMA_LAYER: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "self_attention.layernorm_qkv.layer_norm_weight": {"": "input_layernorm.weight"},
        "self_attention.layernorm_qkv.weight": {
            "query": "self_attn.q_proj.weight",
            "key": "self_attn.k_proj.weight",
            "value": "self_attn.v_proj.weight",
        },
        "self_attention.proj.weight": {"": "self_attn.o_proj.weight"},
        "layernorm_mlp.layer_norm_weight": {"": "post_attention_layernorm.weight"},
        "layernorm_mlp.fc1_weight": {"gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight"},
        "layernorm_mlp.fc2_weight": {"": "mlp.down_proj.weight"},
    }
)
"""A layer's parameter -> the checkpoint's names of its parts; "" is a parameter that is not put together."""


def load_llama(
    tensors: Mapping[str, torch.Tensor],
    layers: Sequence[TransformerLayer] = (),
    *,
    first_layer: int = 0,
    embedding: VocabParallelEmbedding | None = None,
    norm: torch.Tensor | None = None,
    head: VocabParallelHead | None = None,
) -> list[str]:
    """Fill this rank's parts from a whole checkpoint. Local: nothing is communicated.

    Everything is looked up and its shape checked before the first parameter is written. Other dtypes are converted, as
    by ``load_state_dict``.

    Args:
        tensors: name -> whole tensor, as in the safetensors files.
        layers: made with ``normalization="RMSNorm", activation="swiglu", bias=False`` and the checkpoint's
            ``rope_theta`` and ``rms_norm_eps``, which no tensor can tell.
        first_layer: the checkpoint's number of ``layers[0]``, for a pipeline stage.
        embedding, norm, head: None: not on this stage.

    Returns:
        The names of tensors that nobody took, sorted: other stages' layers, or something this model has no place for.

    Raises:
        ConfigError: a tensor is missing or has another shape; a layer is not Llama's.
    """
    places = list(_places(layers, first_layer, embedding, head))
    used: set[str] = set()
    for module, name, parts in places:
        spec = cut_parameter(module, name).spec
        for part, key in parts.items():
            _require_shape(tensors, key, spec.part_shape(part) if part else spec.full_shape, name)
            used.add(key)
    if norm is not None:
        _require_shape(tensors, "model.norm.weight", tuple(norm.shape), "the final norm")
        used.add("model.norm.weight")
        with torch.no_grad():
            norm.copy_(tensors["model.norm.weight"])
    for module, name, parts in places:  # put together one at a time: a second copy of the whole model may not fit
        whole = {part: tensors[key] for part, key in parts.items()}
        load_full_weight(module, name, whole[""] if "" in whole else cut_parameter(module, name).spec.join(whole))
    return sorted(set(tensors) - used)


def llama_tensors(
    layers: Sequence[TransformerLayer] = (),
    *,
    first_layer: int = 0,
    embedding: VocabParallelEmbedding | None = None,
    norm: torch.Tensor | None = None,
    head: VocabParallelHead | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, whole, contiguous, in the parameters' dtype: bit for bit what `load_llama` took.

    Collective over the layers' group: every rank calls it, and gets all tensors on ``device``. One parameter at a time
    is put together on the parameter's own device.

    Args:
        device: where the result is kept.
        Others: as `load_llama`.

    Raises:
        ConfigError: a layer is not Llama's.
    """
    result: dict[str, torch.Tensor] = {}
    for module, name, parts in _places(layers, first_layer, embedding, head):
        full = full_weight(module, name)
        split = {"": full} if "" in parts else cut_parameter(module, name).spec.split(full)
        # Contiguous and with memory of their own: safetensors refuses tensors that share it.
        result |= {
            key: split[part].to(device).clone(memory_format=torch.contiguous_format) for part, key in parts.items()
        }
    if norm is not None:
        result["model.norm.weight"] = norm.detach().to(device).clone()
    return result


def _places(
    layers: Sequence[TransformerLayer],
    first_layer: int,
    embedding: VocabParallelEmbedding | None,
    head: VocabParallelHead | None,
) -> Iterator[tuple[torch.nn.Module, str, dict[str, str]]]:
    """(module, its parameter, part -> name in the checkpoint) of everything, the same on every rank."""
    for number, layer in enumerate(layers, first_layer):
        _require_llama(layer, number)
        for name, parts in LLAMA_LAYER.items():
            yield layer, name, {part: f"model.layers.{number}.{key}" for part, key in parts.items()}
    if embedding is not None:
        yield embedding, "weight", {"": "model.embed_tokens.weight"}
    if head is not None and (embedding is None or head.weight is not embedding.weight):
        yield head, "weight", {"": "lm_head.weight"}


def _require_llama(layer: TransformerLayer, number: int) -> None:
    wrong = [f"{name} (bias=True)" for name, _ in layer.named_parameters() if name.endswith("bias")]
    if layer.layernorm_mlp.activation != "swiglu":
        wrong.append(f"activation={layer.layernorm_mlp.activation!r}")
    for part in (layer.self_attention.layernorm_qkv, layer.layernorm_mlp):
        assert part is not None, "a TransformerLayer's attention has its norm"
        norm = part.norm_options
        if norm.normalization != "RMSNorm" or norm.zero_centered_gamma:
            wrong.append(f"normalization={norm.normalization!r}, zero_centered_gamma={norm.zero_centered_gamma}")
    if wrong:
        raise ConfigError(
            f"layer {number} is not Llama's: {wrong[0]}; make it with normalization='RMSNorm', activation='swiglu', "
            "bias=False"
        )


def _require_shape(tensors: Mapping[str, torch.Tensor], key: str, shape: tuple[int, ...], name: str) -> None:
    if key not in tensors:
        remedy = "pass all files' tensors together"
        if key == "lm_head.weight":
            remedy = "if the checkpoint ties it to the embedding, make VocabParallelHead(weight=embedding.weight)"
        raise ConfigError(f"the checkpoint has no {key}, which {name} needs; {remedy}")
    if tuple(tensors[key].shape) != shape:
        raise ConfigError(
            f"{key} is {list(tensors[key].shape)}, but {name} needs {list(shape)}; make the layers by the checkpoint's "
            "config.json"
        )
