"""KLA over context ranks that hand each other the state itself."""

import pytest

from tests.contract.cases import ALIGNED, CP2, CP4, DENSE, RAGGED, TP2_CP2, Case, Layout
from tests.contract.checks import check_agrees

RELAY = ("mixers.kla.context_exchange=relay", "mixers.gated_deltanet.context_exchange=relay")
RECOMPUTED = Layout("cp2 recompute", CP2.parallel, recompute=True)
RECOMPUTED_4 = Layout("cp4 recompute", CP4.parallel, recompute=True)


@pytest.mark.parametrize(
    ("documents", "layout"),
    [
        (RAGGED, CP2),
        (RAGGED, CP4),
        (DENSE, TP2_CP2),
        (ALIGNED, CP2),
        (DENSE, RECOMPUTED),
        (RAGGED, RECOMPUTED_4),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else str(len(value[0])),
)
def test_computes_what_one_rank_computes(documents, layout):
    check_agrees(Case("kla", documents=documents, overrides=RELAY), layout)
