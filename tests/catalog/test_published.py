"""Models by their published names: parameters as their cards have them, in 1e9."""

from __future__ import annotations

import pytest

from bullet.catalog.models import MODELS, get_model
from bullet.catalog.published import PUBLISHED
from bullet.errors import ConfigError

BILLIONS = {"llama-2-7b": 6.738, "llama-2-70b": 68.98, "llama-3.1-8b": 8.030, "llama-3.1-70b": 70.55, "codellama-34b": 33.74,
            "mistral-nemo-12b": 12.25, "qwen2.5-7b": 7.616, "qwen3-14b": 14.77, "mixtral-8x7b": 46.70, "mixtral-8x22b": 140.6}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_cards(name: str) -> None:
    model = get_model(name)
    assert model.num_parameters / 1e9 == pytest.approx(BILLIONS[model.name], rel=1e-3)
    assert model == MODELS.get(model.name, model)


def test_another_published_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown model 'some/other'"):
        get_model("some/other")
