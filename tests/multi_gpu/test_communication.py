"""What is read from a profiler's trace."""

import json

import pytest

from tests.multi_gpu.communication import kind_of_group, read_trace, ring_bytes


def kernel(name: str, start_us: float, duration_us: float, **arguments) -> dict:
    event = {"ph": "X", "cat": "kernel", "name": name, "ts": start_us, "dur": duration_us}
    return event | {"args": arguments}


def nccl(start_us: float, duration_us: float, collective: str, **arguments) -> dict:
    sizes = {"In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float", "Group size": 4}
    described = {"Collective name": collective, **sizes, **arguments}
    return kernel("ncclDevKernel_x", start_us, duration_us, **described)


def test_bytes_and_hidden_time_by_kind(tmp_path):
    tensor = {"Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"}
    data = {"Process Group Description": "DATA_PARALLEL_GROUP_WITH_CP"}
    events = [
        kernel("gemm", 0, 100),
        kernel("gemm", 50, 100),
        kernel("gemm", 400, 100),
        {"ph": "X", "cat": "cpu_op", "name": "nccl:all_reduce", "ts": 0, "dur": 900, "args": {}},
        {"ph": "i", "name": "marker", "ts": 3},
        nccl(140, 20, "allreduce", **tensor),
        nccl(200, 50, "_allgather_base", **{"Out msg nelems": 4000, "dtype": "BFloat16"}, **data),
        nccl(350, 100, "_reduce_scatter_base", **data),
        kernel("ncclDevKernel_y", 600, 10),
        nccl(700, 10, "gatherv"),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = read_trace(path)
    assert found.sent_bytes == {"tensor": 2 * 3000, "data": 0.75 * 4000 * 2 + 0.75 * 1000 * 4}
    assert found.seconds == pytest.approx({"tensor": 20e-6, "data": 150e-6, "other": 20e-6})
    assert found.exposed_s == pytest.approx({"tensor": 10e-6, "data": 100e-6, "other": 20e-6})
    assert found.computing_s == pytest.approx(250e-6)
    assert found.unsized == {"": 1, "gatherv": 1}


@pytest.mark.parametrize(
    ("collective", "sent"),
    [
        ("allreduce", 150),
        ("allreduce_coalesced", 150),
        ("reduce_scatter_tensor_coalesced", 75),
        ("allgather_into_tensor_coalesced", 300),
        ("all_to_allv", 75),
        ("send", 100),
        ("recv", 0),
    ],
)
def test_ring_bytes(collective, sent):
    assert ring_bytes(collective, 100, 400, 4) == sent
    assert ring_bytes(collective, 100, 400, 1) == 0


def test_an_unknown_collective_is_refused():
    with pytest.raises(ValueError, match="gatherv"):
        ring_bytes("gatherv", 100, 100, 2)


def test_groups_by_megatrons_descriptions():
    kinds = {
        "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
        "CONTEXT_PARALLEL_GROUP": "context",
        "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
        "EMBEDDING_GROUP": "pipeline",
        "DATA_PARALLEL_GROUP_WITH_CP": "data",
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "data",
        "default_pg": "other",
    }
    assert {name: kind_of_group(name) for name in kinds} == kinds
