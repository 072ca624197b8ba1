// The C interface of attention.cpp. Called by minivllm/attention/cpu.py through ctypes, decoder.cpp, and the checks.
#pragma once

#include <cstdint>

extern "C" {

struct minivllm_view {  // one kind of layer
  int32_t num_heads;
  int32_t window;  // a query at position p sees keys p - window + 1 .. p; 0: all up to p
  float scale;
  float soft_cap;  // 0: none
  int32_t row_wise = 0;  // 1: the bits of a query's result may not depend on how many are computed beside it
  const float* slopes = nullptr;  // [num_heads], or null: slope * (key - query) is added to scores (ALiBi)
};

struct minivllm_batch {  // batch.py's InputBatch
  const int32_t* query_start;   // [num_requests + 1]
  const int32_t* seq_lens;      // [num_requests]
  const int32_t* block_tables;  // [num_requests][table_width]
  const int64_t* slots;         // [num_tokens]
  int32_t num_requests, table_width, num_tokens, padded_tokens;
};

// Rows of q lie q_stride elements apart, [num_heads][head_size] each; k and v likewise; out is dense.
struct minivllm_tensors {
  const void *q, *k, *v;
  void *kv, *out;
  int64_t q_stride, k_stride, v_stride;
  int32_t kind;  // of q, k, v and out: 0, 1 or 2
};

// parallel: the OpenMP runtime's GOMP_parallel, the one that torch uses; null: everything in the calling thread.
typedef void (*minivllm_parallel)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);

// Kinds: 0 float32, 1 float16, 2 bfloat16, 3 int8 and 4 e4m3 with a scale per token and head (these two of the cache only).
// A cache in float32 or bfloat16 is for inputs of its kind, the others for any.
void* minivllm_layout(int kv_heads, int head_size, int block_size, int kv_kind);
void minivllm_layout_free(void* layout);
int64_t minivllm_page_bytes(const void* layout);  // K and V of one block and one KV head

// What the layers of a step share. Copies the batch.
void* minivllm_plan(const void* layout, const minivllm_view* views, int num_views, const minivllm_batch* batch);
void minivllm_plan_free(void* plan);

// Writes k and v to their slots of kv, then attends. kv: [blocks][kv_heads][page].
void minivllm_attend(void* plan, int view, const minivllm_tensors* tensors, minivllm_parallel parallel,
                     int num_threads);

const char* minivllm_isa();
}
