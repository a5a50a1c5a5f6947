"""The flags of servers that decide a profile, with their names in servers and in our options.

Every start of the program imports this table, so it stands apart from `flags`, which imports more.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Flag(NamedTuple):
    """A flag of servers.

    field: field of `DeploymentFlags`.
    argument: field of ServerArgs, or variable of the server's environment, that states it.
    kind: form of the value. `layers` are numbers with commas between them.
    help: text of the option; empty for a flag without an option.
    metavar: name of the option's value in the help.
    option: name of the option, without dashes; empty if it is the field's name.
    derived: whether the module `server_info` derives the value by a rule of its own.
    """

    field: str
    argument: str = ""
    kind: Literal["text", "count", "switch", "layers"] = "text"
    help: str = ""
    metavar: str = "NAME"
    option: str = ""
    derived: bool = False

    @property
    def parameter(self) -> str:
        """The name of the option's parameter."""
        return self.option or self.field


# In the order of the help.
FLAGS = (
    Flag("model", "served_model_name", derived=True,
         help="Model name, as given to SGLang.  [default: _name_or_path of the config]",
         option="served_model_name"),
    Flag("sglang", metavar="VERSION",
         help="SGLang release that wrote the store. It decides the key grammar.  [default: "
         "newest]"),
    Flag("page_size", "page_size", derived=True, kind="count", metavar="N",
         help="Tokens per page."),
    Flag("kv_cache_dtype", "kv_cache_dtype", metavar="DTYPE",
         help="SGLang's --kv-cache-dtype.  [default: auto]"),
    Flag("layout", "hicache_mem_layout", metavar="LAYOUT", help="SGLang's --hicache-mem-layout."),
    Flag("tp", "tp_size", derived=True, kind="count", metavar="N",
         help="Tensor parallel size (--tp-size)."),
    Flag("dp", "dp_size", derived=True, kind="count", metavar="N",
         help="Data parallel size (--dp-size)."),
    Flag("enable_dp_attention", "enable_dp_attention", derived=True, kind="switch",
         help="SGLang's --enable-dp-attention: attention TP is tp / dp."),
    Flag("pp", "pp_size", kind="count", metavar="N", help="Pipeline parallel size."),
    Flag("pp_partition", kind="layers", metavar="N,N,…", help="Layers of each pipeline stage."),
    Flag("cp", "attn_cp_size", kind="count", metavar="N", help="Attention context parallel size."),
    Flag("enable_dsa_cache_layer_split", "enable_dsa_cache_layer_split", kind="switch",
         help="SGLang's option: context parallel ranks hold different layers."),
    Flag("dcp", "dcp_size", kind="count", metavar="N", help="Decode context parallel size."),
    Flag("tp_lcm_size", kind="count", metavar="N",
         help="Mooncake with split heads: tp_lcm_size, as given to SGLang."),
    Flag("tag", metavar="TAG", help="Mooncake: extra_backend_tag, as given to SGLang."),
    Flag("speculative_algorithm", "speculative_algorithm",
         help="SGLang's --speculative-algorithm: EAGLE, EAGLE3, …"),
    Flag("speculative_num_steps", "speculative_num_steps", kind="count", metavar="N",
         help="SGLang's option. It is the number of layers of a draft that has one layer for each "
         "step."),
    Flag("enable_multi_layer_eagle", "enable_multi_layer_eagle", kind="switch",
         help="SGLang's option: the draft has one layer for each step."),
    Flag("dsa_prefill_backend", "dsa_prefill_backend",
         help="SGLang's option; decides the row format of fp8 DSA models."),
    Flag("dsa_decode_backend", "dsa_decode_backend",
         help="SGLang's option; see --dsa-prefill-backend."),
    Flag("indexer_dtype",
         help="Dtype of index keys. Give bfloat16 or fp8_e4m3 for MiniMax-M3 with fp8 KV, or the "
         "value of SGLang's --qsa-indexer-dtype. Give fp4 for SGLang's "
         "--enable-deepseek-v4-fp4-indexer."),
    Flag("dsv4_attn_backend", "dsv4_attn_backend",
         help="SGLang's option; decides the row format of DeepSeek-V4."),
    Flag("dsv4_kv_layout", "SGLANG_DSV4_KV_LAYOUT",
         help="SGLANG_DSV4_KV_LAYOUT of the servers: v4, v41 or v41_new."),
    Flag("dsv4_compressed_kv_layout", "SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
         help="SGLANG_DSV4_COMPRESSED_KV_LAYOUT of the servers: auto, fp8 or fp4."),
    Flag("dsv4_compress_state_dtype", "SGLANG_DSV4_COMPRESS_STATE_DTYPE",
         help="SGLANG_DSV4_COMPRESS_STATE_DTYPE of the servers: float32 or bfloat16."),
    # Flags without an option, which only servers state.
    Flag("dtype", "dtype"),
    Flag("storage_backend", "hicache_storage_backend"),
    Flag("io_backend", "hicache_io_backend"),
    Flag("speculative_draft_kv_cache_dtype", "speculative_draft_kv_cache_dtype"),
    Flag("disaggregation_mode", "disaggregation_mode"),
    Flag("mamba_conv_dtype", "SGLANG_MAMBA_CONV_DTYPE"),
    Flag("disable_hybrid_swa_memory", "disable_hybrid_swa_memory", kind="switch"),
    Flag("enable_scattered_sconv", "enable_scattered_sconv", kind="switch"),
    Flag("enable_encoder_swa_bounded_replay", "enable_encoder_swa_bounded_replay", kind="switch"),
)  # fmt: skip
OPTIONS = tuple(flag for flag in FLAGS if flag.help)
