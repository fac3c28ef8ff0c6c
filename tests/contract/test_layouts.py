"""Every mixer computes under every layout what it computes on one rank."""

import pytest

from mixtron.launch.checks import check_shape
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers import mixer_configs
from tests.contract.cases import (
    ALIGNED,
    CONTEXT_LAYOUTS,
    CP2,
    CP4,
    DENSE,
    FOUR,
    MIXER_INDEPENDENT,
    MIXERS,
    PP2,
    PP2_VPP2,
    TP2_SP,
    Case,
    Layout,
    layouts_of,
)
from tests.contract.checks import check_agrees

PAIRS = [(mixer, layout) for mixer in MIXERS for layout in layouts_of(mixer)]


def name(value) -> str:
    return value.name if isinstance(value, Layout) else value


@pytest.mark.parametrize(("mixer", "layout"), PAIRS, ids=name)
def test_packed_ragged_documents(mixer, layout):
    check_agrees(Case(mixer), layout)


@pytest.mark.parametrize(("mixer", "layout"), [p for p in PAIRS if p[1] in (TP2_SP, CP2)], ids=name)
def test_one_dense_document(mixer, layout):
    check_agrees(Case(mixer, documents=DENSE), layout)


@pytest.mark.parametrize(("mixer", "layout"), [p for p in PAIRS if p[1] in (CP2, CP4)], ids=name)
def test_documents_that_begin_where_a_context_rank_does(mixer, layout):
    check_agrees(Case(mixer, documents=ALIGNED), layout)


@pytest.mark.parametrize("layout", [PP2, PP2_VPP2], ids=name)
@pytest.mark.parametrize("mixer", MIXER_INDEPENDENT)
def test_a_pipeline_filled_with_micro_batches(mixer, layout):
    check_agrees(Case(mixer, documents=FOUR), layout)


@pytest.mark.parametrize("layout", [PP2, PP2_VPP2, TP2_SP], ids=name)
@pytest.mark.parametrize("mixer", MIXER_INDEPENDENT)
def test_tied_embeddings(mixer, layout):
    check_agrees(Case(mixer, tied=True), layout)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_mixer_without_context_parallelism_refuses_it_by_name(mixer, monkeypatch):
    monkeypatch.setattr(mixer_configs()[mixer], "context_parallel", False)
    for layout in CONTEXT_LAYOUTS:
        config = Case(mixer).config(layout)
        named = config.model.layer_mixers[0]
        context = layout.parallel.context
        with pytest.raises(ConfigError, match=f"parallel.context={context}: mixer '{named}'"):
            check_shape(config)
