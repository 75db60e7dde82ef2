"""The bodies of the acceptance on GPUs (tests/gpu): of each None where a CPU stands in (`--gpu-stand-in=cpu`), or why
none can.
"""

GRAPHS = "inductor captures CUDA graphs on GPUs alone"
ENGINE = "TensorRT builds for NVIDIA's GPUs alone"
BODIES: dict[str, str | None] = {
    "test_gpu_strategies.py::test_one_device": None,
    "test_gpu_strategies.py::test_deepspeed_on_one_device": None,
    "test_gpu_strategies.py::test_model_split": None,
    "test_gpu_strategies.py::test_dp": "torch's DataParallel drives GPUs alone",
    "test_gpu_strategies.py::test_two_devices": None,
    "test_gpu_strategies.py::test_synchronised_batchnorm": None,
    "test_gpu_strategies.py::test_a_rank_that_hangs_is_ended_within_the_limit": None,
    "test_gpu_precision.py::test_format": None,
    "test_gpu_precision.py::test_an_overflow_halves_the_scale_and_skips_the_step": None,
    "test_gpu_precision.py::test_what_auto_takes": None,
    "test_gpu_precision.py::test_performance_fast": None,
    "test_gpu_precision.py::test_channels_last": None,
    "test_gpu_precision.py::test_the_switch_of_float32_turns_products_and_convolutions": None,
    "test_gpu_compile.py::test_default": None,
    "test_gpu_compile.py::test_default_of_convolutions": None,
    "test_gpu_compile.py::test_whole_step": None,
    "test_gpu_compile.py::test_cuda_graphs": GRAPHS,
    "test_gpu_compile.py::test_mixed": None,
    "test_gpu_data.py::test_resident_images_are_on_the_device": None,
    "test_gpu_data.py::test_workers_give_the_same_batches": None,
    "test_gpu_data.py::test_pinned_batches_are_page_locked": None,
    "test_gpu_data.py::test_tokens": None,
    "test_gpu_methods.py::test_method": None,
    "test_gpu_methods.py::test_qat": None,
    "test_gpu_methods.py::test_a_stack": None,
    "test_gpu_methods.py::test_two_of_four_are_what_the_kernels_take": "torch has 2:4 kernels for GPUs alone",
    "test_gpu_runs.py::test_a_checkpoint_of_one_device_on_the_other": None,
    "test_gpu_runs.py::test_a_kill_changes_nothing_under_deterministic": None,
    "test_gpu_runs.py::test_device_stats": None,
    "test_gpu_runs.py::test_mfu": None,
    "test_gpu_runs.py::test_recomputed_activations_take_less_memory": None,
    "test_gpu_runs.py::test_optimizers_in_one_kernel": None,
    "test_gpu_runs.py::test_optimizers": None,
    "test_gpu_runs.py::test_several_steps_at_once_and_one_by_one": None,
    "test_gpu_runs.py::test_attention": None,
    "test_gpu_targets.py::test_onnx_on_the_cuda_provider": None,
    "test_gpu_targets.py::test_tensorrt": ENGINE,
    "test_gpu_targets.py::test_integers_in_tensorrt": ENGINE,
    "test_gpu_targets.py::test_what_is_missing_is_refused_in_a_sentence": None,
    "test_gpu_targets.py::test_a_receipt_has_rows_of_the_device": None,
    "test_gpu_targets.py::test_inference_suite": None,
    "test_gpu_targets.py::test_gpu_suite": "suite=gpu asks for a GPU",
    "test_gpu_targets.py::test_a_server_on_a_gpu_is_refused_in_a_sentence_so_far": None,
}
# Bodies of many cases, of which the stand-in runs these: a CPU has tests of its own for the others.
FEW: dict[str, set[str]] = {
    "test_gpu_strategies.py::test_one_device": {"ddp", "fsdp strategy.cpu_offload=true", "tensor"},
    "test_gpu_strategies.py::test_deepspeed_on_one_device": {"deepspeed_3_offload"},
    "test_gpu_strategies.py::test_two_devices": {"ddp"},
    "test_gpu_compile.py::test_default": {""},
    "test_gpu_methods.py::test_method": {"ema", "prune_nm", "prune_channels", "distill", "ptq_static"},
}
