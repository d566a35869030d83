"""Fields that clients of such servers send, and that change nothing here: they are taken and dropped."""

from __future__ import annotations

# By where they come from. What a typing error could mean is in `request.TAKEN`.
_NAMES = {
    "OpenAI's own clients": """
        audio cache_control function_call input metadata moderation parallel_tool_calls prediction
        prompt_cache_key prompt_cache_options prompt_cache_retention reasoning reasoning_effort
        safety_identifier service_tier store thinking timeout verbosity web_search_options
    """,
    "vLLM, SGLang, transformers": """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words
        chat_template custom_logit_processor detokenize documents
        early_stopping ebnf enable_thinking guided_choice guided_decoding_backend guided_grammar
        guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning
        include_stop_str_in_output json_schema kv_transfer_params length_penalty
        logits_processors lora_path media_io_kwargs min_tokens
        mm_processor_kwargs no_stop_trim priority prompt_embeds prompt_logprobs regex request_id
        return_hidden_states return_token_ids return_tokens_as_token_ids rid separate_reasoning
        session_id session_params skip_special_tokens spaces_between_special_tokens stop_regex
        stop_token_ids stream_reasoning structural_tag structured_outputs thinking_token_budget
        truncate_prompt_tokens use_beam_search vllm_xargs
    """,
    "llama.cpp": """
        cache_prompt dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
        dry_sequence_breakers dynatemp_exponent dynatemp_range grammar grammar_lazy grammar_triggers
        id_slot lora min_keep mirostat mirostat_eta mirostat_tau n_discard n_indent n_keep n_predict
        n_probs parse_tool_calls penalize_nl penalty_last_n post_sampling_probs preserved_tokens
        reasoning_budget reasoning_format repeat_last_n repeat_penalty response_fields
        return_progress return_tokens samplers slot_id t_max_predict_ms tfs_z thinking_budget
        thinking_forced_open timings_per_token top_a top_n_sigma typical typical_p
       
    """,
    "Ollama, LM Studio, mlx-lm": """
        context_length format images keep_alive mode
        num_batch num_ctx num_draft_tokens num_gpu num_keep num_predict num_thread options raw
        template think ttl
    """,
    "OpenRouter, LiteLLM": """
        api_base api_key base_url caching custom_llm_provider deployment_id drop_params extra_body
        extra_headers extra_query fallbacks mock_response models num_retries plugins provider route
        tags transforms usage
    """,
    "Open WebUI": """
        background_tasks chat_id features files filter_ids id model_item params session tool_ids
        tool_servers variables
    """,
}
IGNORED = frozenset(name for names in _NAMES.values() for name in names.split())
