"""Bodies that the server's own OpenAPI description allows, and others: no answer is a 500, and none hangs."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from mini_engine.server.service import Limits
from tests.server.conftest import CONFIG, serving

LIMITS = Limits(timeout_s=20.0, max_waiting=64)


@pytest.mark.slow
def test_no_body_makes_the_server_fail_or_hang():
    with serving(CONFIG, LIMITS) as running:
        operations = [
            each.ok() for each in schemathesis.openapi.from_url(f"{running.url}/openapi.json").get_all_operations()
        ]
        assert len(operations) > 10
        for operation in operations:
            if operation.path not in ("/v1/steps", "/worker_events"):  # they have no end
                fuzz(operation)
        running.wait_until_idle(30)


def fuzz(operation):
    """Send what the description of an operation allows."""

    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def answers(case):
        if isinstance(case.body, dict) and operation.path.startswith("/v1/"):
            case.body |= {"max_tokens": 4, "max_completion_tokens": 4} if "messages" in case.body else {"max_tokens": 4}
        response = case.call(timeout=60)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    answers()
