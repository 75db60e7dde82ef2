"""The acceptance tests on GPUs that a CPU can't stand in for (`--gpu-stand-in=cpu`), and the cases that it runs."""

GRAPHS = "inductor captures CUDA graphs on GPUs alone"
ENGINE = "TensorRT builds for NVIDIA's GPUs alone"
GPU_ONLY: dict[str, str] = {
    "test_gpu_strategies.py::test_dp": "torch's DataParallel drives GPUs alone",
    "test_gpu_compile.py::test_cuda_graphs": GRAPHS,
    "test_gpu_methods.py::test_two_of_four_are_what_the_kernels_take": "torch has 2:4 kernels for GPUs alone",
    "test_gpu_targets.py::test_tensorrt": ENGINE,
    "test_gpu_targets.py::test_integers_in_tensorrt": ENGINE,
    "test_gpu_targets.py::test_a_receipt_times_what_is_compiled_for_the_device": "a receipt has no rows of a stand-in",
    "test_gpu_targets.py::test_gpu_suite": "suite=gpu asks for a GPU",
    "test_gpu_targets.py::test_a_server_on_the_gpus": "the real command looks for GPUs itself",
}
# Bodies with many cases, and those for the stand-in: other tests run the rest on a CPU.
FEW: dict[str, set[str]] = {
    "test_gpu_strategies.py::test_one_device": {"fsdp strategy.cpu_offload=true"},
    "test_gpu_strategies.py::test_deepspeed_on_one_device": {"deepspeed_3_offload"},
    "test_gpu_strategies.py::test_two_devices": {"ddp"},
    "test_gpu_precision.py::test_format": {"bf16-mixed-plain", "16-mixed-convolutions"},
    "test_gpu_precision.py::test_the_switch_of_float32_turns_products_and_convolutions": {"high"},
    "test_gpu_compile.py::test_default": {""},
    "test_gpu_compile.py::test_mixed": {"16-mixed"},
    "test_gpu_data.py::test_workers_give_the_same_batches": {"true"},
    "test_gpu_data.py::test_pinned_batches_are_page_locked": {"True"},
    "test_gpu_data.py::test_batches_are_made_ahead_on_a_stream_of_their_own": {""},
    "test_gpu_methods.py::test_method": {"prune_nm", "distill"},
    "test_gpu_runs.py::test_optimizers_in_one_kernel": {"fused-adamw"},
    "test_gpu_runs.py::test_optimizers": {"muon"},
    "test_gpu_targets.py::test_workers_of_a_server_compute_on_devices": {"module"},
}
