"""A server with an engine that writes its answers, which a module's `served` gives by itself."""

import pytest

from helpers.serving import until


@pytest.fixture
def engine(served):
    engine = served[1]
    engine.__init__()
    yield engine
    assert until(lambda: engine.open == 0), "a request was left running"


@pytest.fixture
def address(served, engine):
    return served[0]


@pytest.fixture
def client(address):
    import openai

    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as found:
        yield found
