"""What a kernel is, and by which evidence: the order of evidence, and families of names."""

import ast
from pathlib import Path

import pytest
from repository import ROOT
from traces import GEMM, NCCL, OPAQUE, annotation, device_annotation, kernel, launch, operator, write_trace

from threefold.profile.analyze import profile_traces, read_trace
from threefold.profile.classify import EVIDENCE, classify
from threefold.profile.kernel_names import CLASSES, kernel_class, operator_class

COMMUNICATION = (
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
    "ncclSymkDevKernel_AllGather_ST(ncclSymkDevWorkArgs4K)",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)",
    "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*)",
    "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)",
    "void deep_ep::internode::dispatch<false, 4, false, 8192>(int4*)",
    "deep_ep::internode::cached_notify(int)",
    "void deep_ep::internode_ll::combine<true, 7168, 9, 128>(void*)",
    "void hybrid_ep::dispatch_kernel<hybrid_ep::Config<8, 4> >(Params)",
    "void hybrid_ep::combine_kernel<hybrid_ep::Config<8, 4> >(Params)",
    "void hybrid_ep::device_sync_kernel<64>(unsigned int*)",
    "hybrid_ep::update_expected_value_kernel(unsigned long*)",
    "nvshmemi_transfer_rma_put_kernel",
    "nvshmem_barrier_all_on_stream_kernel",
    "void userbuffers_fp16_sum_inplace_gpu_rw_blocked<8>(int)",
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(RankData*)",
    "multimem_all_reduce_kernel",
)
COMPUTE = (
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<Mainloop> >(Params)",
    "void cudnn::fusion::fmha_dgrad_kernel<128, 64>(Params)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)",
    "void at::native::(anonymous namespace)::vectorized_gather_kernel<16, long>(char*)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(int)",
    "triton_poi_fused_add_mul_silu_0",
    "triton_red_fused__softmax_native_layer_norm_3",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)",
    "void hybrid_ep::scan<128, 8>(bool const*)",
    "void hybrid_ep::permute_preprocessing_kernel<4>(int)",
    "void permute_kernel<uint16_t, float>(Args)",
    "void unpermute_kernel<uint16_t>(Args)",
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Traits>(Params)",
    "void multi_tensor_apply_kernel<AdamFunctor<float> >(int)",
    "void cub::CUB_200700::DeviceRadixSortOnesweepKernel<Policy>(int)",
)
COPIES = (
    "Memcpy DtoH (Device -> Pinned)",
    "Memset (Device)",
    "[CUDA memcpy HtoD]",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 2, 64, 64>(int*)",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
)


@pytest.mark.parametrize(
    ("name", "label"),
    [(name, "communication") for name in COMMUNICATION]
    + [(name, "compute") for name in COMPUTE]
    + [(name, "copy") for name in COPIES]
    + [(name, None) for name in (OPAQUE, "k", "main", "_ZN3fooE", "fused_0", "")],
)
def test_families_of_kernel_names(name: str, label: str | None) -> None:
    assert kernel_class(name) == label


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("aten::mm", "compute"),
        ("aten::copy_", "copy"),
        ("MmBackward0", "compute"),
        ("c10d::_allgather_base_", "communication"),
        ("_c10d_functional::reduce_scatter_tensor", "communication"),
        ("record_param_comms", "communication"),
        ("nccl:all_to_all", "communication"),
        ("gloo:all_reduce", "communication"),
        ("_AllToAll", "communication"),
        ("aten::mm, op_id = 7, sizes = [[8, 8], [8, 8]]", "compute"),
        ("_Experts", None),
        ("HybridEPDispatch", None),
        ("ProfilerStep#3", None),
    ],
)
def test_families_of_operators(name: str, label: str | None) -> None:
    assert operator_class(name) == label


def own_kernels() -> set[str]:
    """Kernels that the engine launches: functions under a `jit` decorator that are called as `name[grid](...)`."""
    jitted, launched = set(), set()
    for file in (ROOT / "threefold" / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
                jitted.add(node.name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
    return jitted & launched


def test_kernels_of_our_engine_are_compute() -> None:
    names = own_kernels()
    assert len(names) > 25
    assert {name for name in names if kernel_class(name) != "compute"} == set()


def classes(tmp_path: Path, *events: dict[str, object]) -> list[tuple[str, str]]:
    """Class and evidence of each kernel, in the order of their starts."""
    trace = read_trace(write_trace(tmp_path / "trace.json", events))
    found = classify(trace)
    order = trace.device_spans.start.argsort()
    return [(CLASSES[found.label[i]], EVIDENCE[found.evidence[i]]) for i in order]


def test_metadata_goes_before_the_operator(tmp_path: Path) -> None:
    found = classes(tmp_path, operator("aten::mm", 0, 5, 3), kernel(GEMM, 10, 5, external=3, operation="allreduce"))
    assert found == [("communication", "metadata")]


def test_a_process_group_alone_is_metadata(tmp_path: Path) -> None:
    assert classes(tmp_path, kernel(OPAQUE, 10, 5, group="7")) == [("communication", "metadata")]


def test_the_operator_goes_before_annotations_and_names(tmp_path: Path) -> None:
    events = [
        operator("aten::mm", 0, 5, 3),
        annotation("nccl:all_reduce", 0, 9),
        launch(2, 1, 8),
        kernel(NCCL, 10, 5, external=3, correlation=8),
    ]
    assert classes(tmp_path, *events) == [("compute", "operator")]


def test_an_operator_around_the_launch_is_linked_by_correlation(tmp_path: Path) -> None:
    """The innermost operator of the launching thread; one of another thread at the same time is none of it."""
    events = [
        operator("aten::linear", 0, 20, 1),
        operator("c10d::allreduce_", 5, 10, 2),
        operator("aten::add", 0, 50, 3, thread=200),
        launch(8, 2, 8),
        kernel(OPAQUE, 30, 5, correlation=8),
    ]
    assert classes(tmp_path, *events) == [("communication", "operator")]


def test_names_go_before_ranges_of_modules(tmp_path: Path) -> None:
    """Attention has collectives, and dispatch permutes."""
    events = [
        annotation("threefold.attention", 0, 20),
        launch(1, 1, 1),
        kernel(NCCL, 30, 5, correlation=1),
        launch(3, 1, 2),
        kernel(OPAQUE, 40, 5, correlation=2),
        annotation("threefold.dispatch", 20, 20),
        launch(21, 1, 3),
        kernel("void permute_kernel<uint16_t>(Args)", 50, 5, correlation=3),
        launch(23, 1, 4),
        kernel(OPAQUE, 60, 5, correlation=4),
    ]
    assert classes(tmp_path, *events) == [
        ("communication", "name"),
        ("compute", "region"),
        ("compute", "name"),
        ("communication", "region"),
    ]


def test_an_autograd_function_of_a_dispatcher_leaves_names_the_word(tmp_path: Path) -> None:
    events = [
        operator("HybridEPDispatch", 0, 20, 4),
        kernel("void hybrid_ep::permute_kernel<4>(Args)", 30, 5, external=4),
        kernel("void hybrid_ep::dispatch_kernel<4>(Args)", 40, 5, external=4),
        kernel(OPAQUE, 50, 5, external=4),
    ]
    assert [label for label, _ in classes(tmp_path, *events)] == ["compute", "communication", "communication"]


def test_a_graph_launch_says_nothing_of_its_kernels(tmp_path: Path) -> None:
    """All kernels of a replayed graph have its launch's correlation, collectives and compute alike."""
    events = [
        operator("aten::mm", 0, 20, 1),
        annotation("nccl:all_reduce", 0, 20),
        launch(5, 5, 9, name="cudaGraphLaunch"),
        kernel(NCCL, 30, 5, correlation=9, external=1),
        kernel(GEMM, 40, 5, correlation=9, external=1),
        kernel(OPAQUE, 50, 5, correlation=9, external=1),
    ]
    found = classes(tmp_path, *events)
    assert found == [("communication", "name"), ("compute", "name"), ("unknown", "none")]


def test_a_range_on_another_stream_is_none_of_the_kernel(tmp_path: Path) -> None:
    events = [device_annotation("nccl:all_reduce", 0, 50, stream=20), kernel(OPAQUE, 10, 5, stream=7)]
    assert classes(tmp_path, *events) == [("unknown", "none")]


def test_unknown_time_lowers_the_confidence(tmp_path: Path) -> None:
    found = []
    for unknown in (0.001, 40.0, 400.0):
        events = [kernel(GEMM, 0, 100), kernel(OPAQUE, 100, unknown)]
        found.append(profile_traces([write_trace(tmp_path / "trace.json", events)]))
    assert [one.diagnosis.dominant for one in found] == ["compute", "compute", "unknown"]
    assert found[0].diagnosis.confidence > found[1].diagnosis.confidence > found[2].diagnosis.confidence == 0
    assert found[1].to_json()["walls"]["unknown"]["total_seconds"] == pytest.approx(40e-6)


def test_the_launch_may_name_the_operator_instead_of_the_kernel(tmp_path: Path) -> None:
    call = launch(50, 2, 8)
    call["args"]["External id"] = 3
    assert classes(tmp_path, operator("aten::mm", 0, 5, 3), call, kernel(OPAQUE, 60, 5, correlation=8)) == [
        ("compute", "operator")
    ]


def test_waits_of_streams_are_no_kernels(tmp_path: Path) -> None:
    """Kineto writes events of synchronization beside kernels, on the same streams."""
    wait = {**kernel("Stream Wait Event", 0, 500, correlation=4), "cat": "cuda_sync"}
    assert classes(tmp_path, wait, kernel(GEMM, 10, 5)) == [("compute", "name")]


def test_kernels_without_a_category(tmp_path: Path) -> None:
    bare = kernel(NCCL, 10, 5, correlation=4)
    del bare["cat"]
    other = {"ph": "X", "name": "Process 1", "pid": 1, "tid": 1, "ts": 0.0, "dur": 100.0}
    assert classes(tmp_path, bare, other) == [("communication", "name")]
