"""Every field of vLLM's configs, with a verdict: does it change the KV of given tokens?

IN: its value is part of the namespace. FREE: it does not change KV, for the given reason. REFUSED:
the connector stays off unless the value is neutral. A field without a verdict is unknown: see
`identity.settings`. The table covers vLLM 0.29 to 0.33; `engine/list_fields.py` lists a version's
fields.

When in doubt, a field is IN: that only costs reuse between engines with different values. FREE
needs a reason, and a field that differs between two starts of the same engine must be FREE.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Verdict(enum.Enum):
    """A field's role in the namespace."""

    IN = "in"
    FREE = "free"
    REFUSED = "refused"


IN: Mapping[str, str] = {
    "AttentionConfig": (
        "backend backend_per_kind disable_flashinfer_q_quantization "
        "flash_attn_max_num_splits_for_cuda_graph flash_attn_version flex_attn_block_m "
        "flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size indexer_kv_dtype "
        "indexer_sparse_logits indexer_tp_shard_min_rows minimax_m3_indexer_cp "
        "minimax_m3_msa_decode_backend mla_prefill_backend sparse_mla_force_mqa "
        "sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph trtllm_ragged_backend use_fp4_indexer_cache "
        "use_non_causal use_prefill_query_quantization use_trtllm_attention"
    ),
    "CacheConfig": (
        "cache_dtype is_attention_free kv_cache_dtype_skip_layers kv_sharing_fast_prefill "
        "sliding_window swa_bounded_replay"
    ),
    "CompilationConfig": (
        "backend compile_mm_encoder custom_ops dynamic_shapes_config inductor_compile_config "
        "inductor_passes ir_enable_torch_wrap mode pass_config splitting_ops "
        "use_inductor_graph_partition"
    ),
    "DynamicShapesConfig": "assume_32_bit_indexing evaluate_guards type",
    "EncoderCacheManagerConfig": "encoder_cache_manager_cls manager_config",
    "IrOpPriorityConfig": "fused_add_rms_norm gelu_and_mul_sparse rms_norm",
    "KernelConfig": (
        "enable_bf16x3_router_gemm enable_flashinfer_autotune "
        "enable_rocm_segmented_attn_autotune ir_op_priority linear_backend "
        "linear_backend_per_quant moe_backend monokernel sparse_indexer_topk_backend"
    ),
    "LoRAConfig": (
        "default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras "
        "enable_tower_connector_lora fully_sharded_loras lora_dtype specialize_active_lora "
        "target_modules"
    ),
    "LoadConfig": "ignore_patterns load_format model_loader_extra_config",
    "ModelConfig": (
        "convert disable_cascade_attn disable_sliding_window dtype hf_config hf_text_config "
        "is_submodel_config model_class_overrides model_impl multimodal_config quantization "
        "quantization_config runner word_embeddings_untied_by_checkpoint"
    ),
    "MultiModalConfig": (
        "allow_missing_mm_embeddings enable_mm_embeds language_model_only media_io_kwargs "
        "mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_save_margin mm_encoder_only mm_encoder_tp_mode "
        "mm_processor_kwargs video_pruning_method video_pruning_rate"
    ),
    "ParallelConfig": (
        "all2all_backend disable_custom_all_reduce enable_expert_parallel enable_hc_sp is_moe_model"
    ),
    "PassConfig": (
        "eliminate_noops enable_qk_norm_rope_fusion enable_sp fi_allreduce_fusion_max_size_mb "
        "fuse_act_padding fuse_act_quant fuse_allreduce_rms fuse_attn_quant fuse_gemm_comms "
        "fuse_mla_dual_rms_norm fuse_norm_quant fuse_qk_norm_rope_kvcache fuse_rope_kvcache "
        "fuse_rope_kvcache_cat_mla rope_kvcache_fusion_max_token_num sp_min_token_num"
    ),
    "QuantSpec": "activation weight",
    "QuantizationConfigArgs": "ignore linear moe targets",
    "SpeculativeConfig": (
        "attention_backend disable_eagle_block_drop disable_padded_drafter_batch "
        "draft_lm_head_quantization draft_load_config draft_model_config "
        "draft_tensor_parallel_size index_share_for_mtp_iteration kv_cache_dtype max_model_len "
        "method moe_backend num_speculative_tokens parallel_drafting quantization "
        "tensor_parallel_size use_heterogeneous_vocab"
    ),
    "VllmConfig": (
        "additional_config attention_config cache_config compilation_config ec_manager_config "
        "kernel_config load_config lora_config model_config optimization_level parallel_config "
        "performance_mode speculative_config"
    ),
}
"""Fields by class. A field that holds another config stands for that config's fields."""

FREE: tuple[tuple[str, Mapping[str, str]], ...] = (
    (
        "A field of the namespace has the value, or a check refuses values that change KV.",
        {
            "CacheConfig": (
                "block_size kv_cache_layout hash_block_size prefix_match_unit "
                "enable_prefix_caching prefix_caching_hash_algo _block_size_resolved "
                "user_specified_block_size"
            ),
            "ParallelConfig": "tensor_parallel_size pipeline_parallel_size rank world_size",
            "DeviceConfig": "device device_type",
            "ModelConfig": "max_model_len",
            "VllmConfig": "device_config",
        },
    ),
    (
        "Where the model, its code or its config were read from; the content is in the "
        "fingerprint.",
        {
            "ModelConfig": (
                "model model_weights hf_config_path revision code_revision trust_remote_code "
                "hf_overrides config_format hf_token"
            ),
            "SpeculativeConfig": "model revision code_revision",
            "VllmConfig": "quant_config",
            "LoadConfig": "download_dir",
        },
    ),
    (
        "How weights are loaded, and where they lie in memory; their values are the same.",
        {
            "LoadConfig": (
                "device pt_load_map_location safetensors_load_strategy "
                "safetensors_prefetch_block_size safetensors_prefetch_num_threads "
                "use_tqdm_on_load"
            ),
            "OffloadConfig": "offload_backend prefetch uva",
            "UVAOffloadConfig": "cpu_offload_gb cpu_offload_params",
            "PrefetchOffloadConfig": (
                "offload_group_size offload_num_in_group offload_params offload_prefetch_step"
            ),
            "EngramConfig": "cpu_offload dp_shared_memory embedding_across_dp use_thp",
            "ModelConfig": (
                "enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode "
                "sleep_mode_backend sleep_mode_offload_cudagraph "
                "sleep_preserve_parameter_names"
            ),
            "ParallelConfig": "max_parallel_loading_workers enable_ep_weight_filter",
            "VllmConfig": "engram_config offload_config",
        },
    ),
    (
        "Amounts of memory, and of tokens and requests computed together. A token's KV depends on "
        "its prefix; its batch only affects the rounding of sums, as it does without a cache.",
        {
            "CacheConfig": (
                "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
                "kv_cache_memory_bytes kv_cache_size_tokens kv_cache_max_concurrency "
                "effective_attention_block_size simple_cpu_offload_num_blocks "
                "cache_hit_alignment_tokens prefix_cache_retention_interval kv_offloading_size "
                "kv_offloading_backend"
            ),
            "SchedulerConfig": (
                "async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager "
                "enable_chunked_prefill encoder_cache_size is_multimodal_model "
                "long_prefill_token_threshold long_prefill_token_threshold_adaptive "
                "max_num_active_seqs max_num_batched_tokens max_num_encoder_input_tokens "
                "max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens "
                "max_num_seqs policy prefill_schedule_interval runner_type scheduler_cls "
                "scheduler_reserve_full_isl stream_interval watermark"
            ),
            "ParallelConfig": (
                "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold"
            ),
            "CompilationConfig": (
                "cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_decoder_replay "
                "cudagraph_mm_encoder cudagraph_mode cudagraph_num_of_warmups "
                "cudagraph_specialize_lora max_cudagraph_capture_size "
                "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold "
                "encoder_cudagraph_max_frames_per_batch "
                "encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_token_budgets "
                "compile_sizes compile_ranges_endpoints"
            ),
            "LoRAConfig": "max_loras max_cpu_loras max_lora_rank max_lora_cls_labels",
            "MultiModalConfig": "limit_per_prompt mm_ipc_gpu_memory_gb",
            "BaseDummyOptions": "count",
            "VllmConfig": "scheduler_config",
        },
    ),
    (
        "Mamba states and sliding windows: models that have them are refused.",
        {
            "CacheConfig": (
                "mamba_page_size_padded skip_page_size_padded mamba_block_size "
                "mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype "
                "enable_mamba_fine_grained_prefix_cache enable_mamba_shared_prefix_checkpoint "
                "replayssm_buffer_len use_kda_recoverssm use_replayssm "
                "user_specified_mamba_block_size"
            ),
            "MambaConfig": (
                "backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds"
            ),
            "VllmConfig": "mamba_config",
        },
    ),
    (
        "Use of hidden states after KV is computed: sampling, drafts, pooling, grammars, output.",
        {
            "ModelConfig": (
                "seed return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel "
                "enable_trace_replay enable_return_routed_experts logits_processors "
                "generation_config override_generation_config pooler_config"
            ),
            "SpeculativeConfig": (
                "draft_sample_method dspark_draft_topk enable_adaptive_verification "
                "fly_entropy_threshold fly_entropy_top_k fly_window_size "
                "num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min "
                "rejection_sample_method suffix_decoding_max_cached_requests "
                "suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth "
                "suffix_decoding_min_token_prob synthetic_acceptance_length "
                "synthetic_acceptance_rates use_local_argmax_reduction xpress_topc "
                "disable_lookahead_block_hashes"
            ),
            "AuxOutputConfig": "enable_return_routed_experts max_bytes",
            "PoolerConfig": (
                "dimensions enable_chunked_processing enable_flash_late_interaction logit_mean "
                "logit_sigma max_embed_len pooling_type returned_token_ids seq_pooling_type "
                "step_tag_id task tok_pooling_type use_activation"
            ),
            "ReasoningConfig": (
                "_enabled _natural_reasoning_end_token_ids _reasoning_end_token_ids "
                "_reasoning_start_token_ids reasoning_end_str reasoning_parser "
                "reasoning_start_str"
            ),
            "StructuredOutputsConfig": (
                "backend disable_additional_properties disable_any_whitespace "
                "enable_in_reasoning reasoning_parser reasoning_parser_plugin"
            ),
            "WatermarkConfig": (
                "algorithm allow_target_only_watermarking alpha context_width "
                "deduplicate_contexts deduplicate_contexts_max_history key prf"
            ),
            "VllmConfig": (
                "aux_output_config reasoning_config structured_outputs_config watermark_config"
            ),
        },
    ),
    (
        "Processing of a request into tokens and media, which block hashes cover; names, limits "
        "and permissions.",
        {
            "ModelConfig": (
                "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
                "served_model_name allowed_local_media_path allowed_media_domains "
                "enable_prompt_embeds io_processor_plugin renderer_num_workers "
                "allow_deprecated_quantization spec_target_max_model_len"
            ),
            "MultiModalConfig": (
                "interleave_mm_strings mm_hasher_algorithm mm_processor_cache_gb "
                "mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc "
                "skip_mm_profiling"
            ),
        },
    ),
    (
        "Number, place and communication of processes. Ranks that share a sum are in the "
        "namespace.",
        {
            "ParallelConfig": (
                "_allow_auto_resolve_cp_interleave_size _api_process_count _api_process_rank "
                "_coord_store_port _data_parallel_master_port_list assigned_physical_gpu_ids "
                "cp_kv_cache_interleave_size cpu_distributed_timeout_seconds "
                "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb "
                "data_parallel_index data_parallel_master_ip data_parallel_master_port "
                "data_parallel_rank data_parallel_rank_local data_parallel_rpc_port "
                "data_parallel_size data_parallel_size_local dcp_comm_backend "
                "dcp_kv_cache_interleave_size dcp_q_replicate "
                "disable_nccl_for_dp_synchronization distributed_executor_backend "
                "distributed_timeout_seconds dp_sync_interval elastic_ep_max_dp_size "
                "enable_batch_sharded_sampling enable_eplb enable_fault_tolerance eplb_config "
                "fault_tolerance_config "
                "enable_shm_tensor_arena expert_placement_strategy master_addr master_port "
                "node_rank numa_bind numa_bind_cpus numa_bind_nodes placement_group "
                "ray_runtime_env ray_workers_use_nsight"
            ),
            "EPLBConfig": (
                "communicator enable_migration_batching log_balancedness "
                "log_balancedness_interval num_redundant_experts policy step_interval "
                "use_async window_size"
            ),
            "FaultToleranceConfig": "engine_recovery_timeout_sec",
            "KVTransferConfig": (
                "engine_id kv_buffer_device kv_buffer_size kv_connector "
                "kv_connector_extra_config kv_connector_module_path kv_ip "
                "kv_load_failure_policy kv_parallel_size kv_port kv_rank kv_role"
            ),
            "KVEventsConfig": (
                "buffer_steps enable_kv_cache_events endpoint hwm max_queue_size publisher "
                "replay_endpoint topic"
            ),
            "VllmConfig": "instance_id kv_events_config kv_transfer_config shutdown_timeout",
        },
    ),
    (
        "Logs, metrics, traces, caches of compiled code, warm-up.",
        {
            "ObservabilityConfig": (
                "collect_detailed_traces cudagraph_metrics custom_histogram_buckets "
                "enable_layerwise_nvtx_tracing enable_logging_iteration_details "
                "enable_mfu_metrics enable_mm_processor_stats jit_monitor_mode "
                "jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample "
                "otlp_traces_endpoint per_request_spec_decode_metrics "
                "show_hidden_metrics_for_version"
            ),
            "LoggingConfig": "configure_logging formatter log_level pylogging_config_file",
            "ProfilerConfig": (
                "active_iterations capture_torch_profiler delay_iterations "
                "detailed_trace_annotation ignore_frontend max_iterations profiler "
                "proton_backend proton_context proton_data proton_graph_attribution "
                "proton_hook proton_mode proton_output_format proton_profiler_dir "
                "torch_profiler_activities torch_profiler_dir "
                "torch_profiler_dump_cuda_time_total torch_profiler_record_shapes "
                "torch_profiler_use_gzip torch_profiler_with_flops torch_profiler_with_memory "
                "torch_profiler_with_stack wait_iterations warmup_iterations"
            ),
            "WatchdogConfig": "check_interval dump_dir timeout",
            "CompilationConfig": (
                "cache_dir local_cache_dir compile_cache_save_format compilation_time "
                "encoder_compilation_time debug_dump_path traced_files static_all_moe_layers "
                "static_forward_context enabled_custom_ops disabled_custom_ops "
                "fast_moe_cold_start"
            ),
            "KernelConfig": "enable_cutedsl_warmup enable_jit_warmup",
            "VllmConfig": "logging_config observability_config profiler_config watchdog_config",
        },
    ),
    (
        "Its effect is in `compilation_config`, or in `model_config` itself.",
        {
            "ModelConfig": "enforce_eager",
            "SpeculativeConfig": (
                "enforce_eager target_model_config target_parallel_config draft_parallel_config"
            ),
        },
    ),
    (
        "Fields of a config that is refused whenever it is given.",
        {
            "DiffusionConfig": "canvas_length max_denoising_steps",
            "ECTransferConfig": (
                "ec_buffer_device ec_buffer_size ec_connector ec_connector_extra_config "
                "ec_connector_module_path ec_ip ec_parallel_size ec_port ec_rank ec_role "
                "engine_id mm_encoder_output_widths"
            ),
            "HiSparseConfig": "device_buffer_size eager_host_mirror",
            "WeightTransferConfig": "backend",
        },
    ),
)
"""Pairs of a reason and the fields, by class, that it applies to."""

REFUSED: Mapping[str, str] = {
    "VllmConfig.weight_transfer_config": "it lets the engine's weights be replaced while it runs",
    "VllmConfig.ec_transfer_config": "another engine encodes the images",
    "VllmConfig.diffusion_config": "a diffusion model rewrites the KV of its tokens",
    "AttentionConfig.hisparse_config": "part of the KV lies outside the engine's pages",
    "KVTransferConfig.enable_permute_local_kv": "the engine reorders KV that was loaded",
    "MultiModalConfig.mm_encoder_fp8_scale_path": "a file sets the scale of images, and may change",
    "MultiModalConfig.mm_encoder_fp8_scale_save_path": "earlier images set the scale of later ones",
    "ParallelConfig.decode_context_parallel_size": "context parallelism is not supported",
    "ParallelConfig.prefill_context_parallel_size": "context parallelism is not supported",
    "ParallelConfig.nnodes": "the engine spans several nodes, and a daemon serves only one",
    "ParallelConfig.enable_elastic_ep": "ranks are added and removed while the engine runs",
    "ParallelConfig.worker_cls": "code outside of vLLM runs the model",
    "ParallelConfig.sd_worker_cls": "code outside of vLLM runs the model",
    "ParallelConfig.worker_extension_cls": "code outside of vLLM can replace the weights",
}
"""Why each of these fields is refused; keys are Class.field."""


def _verdicts() -> dict[tuple[str, str], Verdict]:
    found: dict[tuple[str, str], Verdict] = {}
    groups = [(Verdict.IN, IN), *((Verdict.FREE, group) for _, group in FREE)]
    groups += [(Verdict.REFUSED, dict([full.split(".")])) for full in REFUSED]
    for verdict, group in groups:
        for config, names in group.items():
            for name in names.split():
                assert (config, name) not in found, f"two verdicts on {config}.{name}"
                found[config, name] = verdict
    return found


VERDICTS = _verdicts()
"""The verdict on each (class, field)."""

CONFIGS = frozenset(config for config, _ in VERDICTS)
"""Names of the config classes in the table."""


def is_neutral(value: object) -> bool:
    """Whether a REFUSED field's value changes nothing: None, off, 1, or a class of vLLM's."""
    if isinstance(value, str):
        return value in ("", "auto") or value.startswith("vllm.")
    return value is None or value is False or value == 1
