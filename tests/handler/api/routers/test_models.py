"""`/v1/models`: what lines may ask for."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI
from openai.types import Model

from tests.handler.api.rig import answer_to, refusal_in, request_of
from tidemill.batch.fleet import WorkerRate
from tidemill.handler.api.envelope.caller import aws
from tidemill.handler.deployment import deployment


def test_the_models_that_are_served_are_listed(client: OpenAI) -> None:
    """The SDK lists them, in the order of the deployment."""
    found = list(client.models.list())
    assert [model.id for model in found] == ["tidemill-demo", "lab/large"]
    for model in found:
        Model.model_validate(model.to_dict(), strict=True)


@pytest.mark.parametrize("name", ["tidemill-demo", "lab/large"])
def test_a_model_is_found_by_its_name(client: OpenAI, name: str) -> None:
    """Slashes and all."""
    assert client.models.retrieve(name).id == name


def test_a_model_has_the_speed_and_the_cost_of_its_workers(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are unknown before a worker has measured them, and without a price."""
    found = [client.models.retrieve("lab/large").to_dict()["tidemill"]]
    here = deployment()
    rate = WorkerRate(expected_work_per_second=50, num_gpus=2)
    aws().run(here.fleets.put_rate("lab/large", rate))
    found.append(client.models.retrieve("lab/large").to_dict()["tidemill"])
    prices = here.settings.model_copy(update={"gpu_hour_prices": {"lab/large": 3.0}})
    monkeypatch.setattr(here, "settings", prices)
    found.append(client.models.retrieve("lab/large").to_dict()["tidemill"])
    assert found == [
        None,
        {"tokens_per_second": 50.0, "cost_per_hour": None},
        {"tokens_per_second": 50.0, "cost_per_hour": 6.0},
    ]


def test_a_slash_may_come_quoted(client: OpenAI) -> None:
    """Proxies need not unquote paths."""
    del client
    assert answer_to(request_of("/v1/models/lab%2Flarge"))["statusCode"] == 200


@pytest.mark.parametrize("name", ["large", "lab", "lab/large/x", "x" * 3000, "é", "%00"])
def test_a_model_that_is_not_served_is_not_found(client: OpenAI, name: str) -> None:
    """The error has the code that a line for such a model gets."""
    del client
    status, error = refusal_in(answer_to(request_of(f"/v1/models/{name}")))
    assert (status, error["code"]) == (404, "model_not_found")


def test_the_sdk_knows_that_error(client: OpenAI) -> None:
    """The SDK raises the same error as for any unknown model."""
    with pytest.raises(openai.NotFoundError, match="Model none not found"):
        client.models.retrieve("none")


def test_other_names_of_a_model_are_listed_with_what_runs_for_them(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aliases follow the models; the wildcard model is named in an extra field of the list."""
    monkeypatch.setattr(
        deployment(),
        "models",
        {"gpt-4o": "lab/large", "*": "tidemill-demo", "lab/large": "lab/large"},
    )
    page = client.models.list()
    found = [(model.id, model.to_dict()["root"]) for model in page.data]
    assert found == [("lab/large", "lab/large"), ("gpt-4o", "lab/large")]
    assert page.to_dict()["any_model"] == "tidemill-demo"
    for name, root in (("gpt-4o", "lab/large"), ("gpt-5", "tidemill-demo")):
        assert client.models.retrieve(name).to_dict()["root"] == root


def test_an_adapter_is_listed_with_the_model_that_it_is_of(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has no parent."""
    here = deployment()
    settings = here.settings.model_copy(update={"model_adapters": {"sql": "lab/large"}})
    monkeypatch.setattr(here, "settings", settings)
    monkeypatch.setattr(here, "models", {"sql": "lab/large", "lab/large": "lab/large"})
    found = {model.id: model.to_dict() for model in client.models.list()}
    parents = {name: (model["root"], model["parent"]) for name, model in found.items()}
    assert parents == {"lab/large": ("lab/large", None), "sql": ("lab/large", "lab/large")}
    assert client.models.retrieve("sql").to_dict()["parent"] == "lab/large"
