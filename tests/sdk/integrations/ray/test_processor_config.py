"""Configs of Ray's processors, and what they mean here."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tidemill import TidemillError
from tidemill.sdk.integrations.ray.processor_config import vLLMEngineProcessorConfig

parse = vLLMEngineProcessorConfig.parse


def config(**given: Any) -> vLLMEngineProcessorConfig:
    """Return a config of a model."""
    return parse(vLLMEngineProcessorConfig(model_source="m", **given))


def build(given: dict[str, Any]) -> None:
    """Do what is done with a config before anything runs."""
    found = config(**given)
    found.check_multimodal_stage()
    found.pool()
    found.engine_options()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray's own code warns of its past
def test_fields_and_defaults_are_those_of_ray() -> None:
    """An instance of Ray's own config class is also accepted."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    from ray.data.llm import vLLMEngineProcessorConfig as Rays

    assert {each.name for each in fields(vLLMEngineProcessorConfig)} == set(Rays.model_fields)
    theirs = parse(Rays(model_source="m", engine_kwargs={"max_num_seqs": 8}, concurrency=(1, 3)))
    ours = config(engine_kwargs={"max_num_seqs": 8}, concurrency=(1, 3))
    assert theirs.engine_options() == ours.engine_options()
    assert theirs.pool() == ours.pool()
    for each in fields(vLLMEngineProcessorConfig):
        if each.name != "engine_kwargs":  # to which Ray's adds the task
            assert getattr(theirs, each.name) == getattr(ours, each.name)


def test_options_of_vllm_become_those_of_an_engine() -> None:
    """Options without effect here are omitted."""
    kwargs = {
        "max_model_len": 64,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.9,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 2,
        "task_type": "embed",
    }
    found = config(task_type="embed", engine_kwargs=kwargs)
    assert found.engine_options() == {
        "model": "m",
        "runner": "pooling",
        "convert": "embed",
        "max_model_len": 64,
        "tensor_parallel_size": 2,
    }
    assert found.pool().gpus_per_engine == 2
    assert found.pool().sizes == (1, 1)


def test_a_chat_template_may_be_off_or_another() -> None:
    """The option is a boolean, a dict or a config of Ray's."""
    assert not config(chat_template_stage=False).chat_template
    assert not config(chat_template_stage={"enabled": False}).chat_template
    found = config(chat_template_stage={"chat_template": "{{ messages }}"})
    assert found.engine_options()["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine_kwargs": {"pipeline_parallel_size": 2}}, "use --tensor-parallel-size"),
        ({"engine_kwargs": {"revision": "main"}}, "vLLM's `revision` is not supported"),
        ({"engine_kwargs": {"max_num_seq": 2}}, "did you mean `max_num_seqs`"),
        ({"task_type": "reward"}, "`task_type` must be one of generate, embed"),
        ({"dynamic_lora_loading_path": "s3://b"}, "`dynamic_lora_loading_path` is not supported"),
        ({"placement_group_config": {}}, "`placement_group_config` is not supported"),
        ({"concurrency": 0}, "`engines` must"),
        ({"batch_size": 0}, "`batch_size` must be a whole number"),
        ({"chat_template_stage": {"model_source": "n"}}, "chat_template_stage.model_source"),
        ({"chat_template_stage": 3}, "`chat_template_stage` must be"),
        ({"prepare_multimodal_stage": {"model_config_kwargs": {"a": 1}}}, "model_config_kwargs"),
    ],
)
def test_what_would_change_rows_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    """The error comes before anything runs."""
    with pytest.raises(TidemillError, match=words):
        build(given)


def test_a_config_of_another_kind_is_left_to_ray() -> None:
    """The error suggests Ray's function."""
    with pytest.raises(TidemillError, match=r"not a dict: use ray\.data\.llm"):
        parse({})
