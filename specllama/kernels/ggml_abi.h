// The parts of ggml's interface that the door uses, declared here so that no header and no library
// of llama.cpp is needed to compile it. The layouts are those of GGML_VERSION; check() in door.cpp
// compares them with the library that is loaded, and refuses another.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

struct ggml_backend_buffer;
struct ggml_backend_buffer_type;
struct ggml_threadpool;
struct ggml_context;

struct ggml_tensor {
    int type;
    ggml_backend_buffer *buffer;
    int64_t ne[4];
    size_t nb[4];
    int op;
    int32_t op_params[16];
    int32_t flags;
    ggml_tensor *src[10];
    ggml_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[64];
    void *extra;
    char padding[8];
};

struct ggml_type_traits {
    const char *type_name;
    int64_t blck_size, blck_size_interleave;
    size_t type_size;
    bool is_quantized;
    void (*to_float)(const void *, float *, int64_t);
};

struct ggml_backend_buffer_type_i {
    const char *(*get_name)(ggml_backend_buffer_type *);
    ggml_backend_buffer *(*alloc_buffer)(ggml_backend_buffer_type *, size_t);
    size_t (*get_alignment)(ggml_backend_buffer_type *);
    size_t (*get_max_size)(ggml_backend_buffer_type *);
    size_t (*get_alloc_size)(ggml_backend_buffer_type *, const ggml_tensor *);
    bool (*is_host)(ggml_backend_buffer_type *);
};

struct ggml_backend_buffer_type {
    ggml_backend_buffer_type_i iface;
    void *device;
    void *context;
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer *);
    void *(*get_base)(ggml_backend_buffer *);
    int (*init_tensor)(ggml_backend_buffer *, ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer *, ggml_tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(ggml_backend_buffer *, ggml_tensor *, const void *, size_t, size_t);
    void (*get_tensor)(ggml_backend_buffer *, const ggml_tensor *, void *, size_t, size_t);
    void (*set_tensor_2d)(ggml_backend_buffer *, ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(ggml_backend_buffer *, const ggml_tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(ggml_backend_buffer *, const ggml_tensor *, ggml_tensor *);
    void (*clear)(ggml_backend_buffer *, uint8_t);
    void (*reset)(ggml_backend_buffer *);
};

struct ggml_backend_buffer {
    ggml_backend_buffer_i iface;
    ggml_backend_buffer_type *buft;
    void *context;
    size_t size;
    int usage;
};

struct ggml_compute_params {
    int ith, nth;
    size_t wsize;
    void *wdata;
    ggml_threadpool *threadpool;
    bool use_ref;
};

namespace ggml::cpu {
class tensor_traits {
public:
    virtual ~tensor_traits() = default;
    virtual bool work_size(int threads, const ggml_tensor *op, size_t &size) = 0;
    virtual bool compute_forward(ggml_compute_params *params, ggml_tensor *op) = 0;
};
class extra_buffer_type {
public:
    virtual ~extra_buffer_type() = default;
    virtual bool supports_op(void *device, const ggml_tensor *op) = 0;
    virtual tensor_traits *get_tensor_traits(const ggml_tensor *op) = 0;
};
} // namespace ggml::cpu
