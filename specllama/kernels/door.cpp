// The door: how ggml's CPU backend comes to use these kernels.
//
// ggml-cpu has a list of "extra buffer types". A loader asks each in turn if it takes a tensor of
// weights (supports_op), lets it allocate and fill the tensor (here: packed, layout.h), and the
// backend asks each about every operation before it computes it itself. Nothing is patched or
// linked: an entry is pushed to the front of that list, before the first model is loaded, and stays.
#include "attention.h"
#include "ggml_abi.h"
#include "product.h"
#include "random_weights.h"
#include "reference.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#ifndef _WIN32
#include <dlfcn.h>
#include <sys/mman.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace specllama {
namespace {

const Kernels *chosen = nullptr;
std::atomic<bool> offered{false};  // to loaders; what was loaded is computed whatever it says
int op_mul_mat = -1, op_mul_mat_id = -1, op_attention = -1;
int packing_threads = 1;

void (*barrier)(ggml_threadpool *) = nullptr;
ggml_backend_buffer *(*buffer_init)(ggml_backend_buffer_type *, ggml_backend_buffer_i, void *, size_t) = nullptr;

const ggml_type_traits *(*traits_of)(int) = nullptr;

extern ggml_backend_buffer_type buffer_type;

bool ours(const ggml_tensor *t) { return t && t->buffer && t->buffer->buft == &buffer_type && !t->view_src; }

bool is_product(const ggml_tensor *op) {
    return (op->op == op_mul_mat || op->op == op_mul_mat_id) && ours(op->src[0]);
}

// Products of `op` as each thread sees them; vectors of a thread are used again.
const Product &product_of(const ggml_tensor *op) {
    static thread_local Product p;
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    p.type = w->type, p.values = w->ne[0], p.outputs = w->ne[1];
    p.rows.clear(), p.panels.clear();
    const auto row = [&](int64_t x1, int64_t x2, int64_t x3, int64_t y1, int64_t y2, int64_t y3) {
        p.rows.push_back({(const float *)((const char *)x->data + x1 * x->nb[1] + x2 * x->nb[2] + x3 * x->nb[3]),
                          (float *)((char *)op->data + y1 * op->nb[1] + y2 * op->nb[2] + y3 * op->nb[3])});
    };
    if (op->op == op_mul_mat) {
        for (int64_t i3 = 0; i3 < x->ne[3]; i3++)
            for (int64_t i2 = 0; i2 < x->ne[2]; i2++)
                for (int64_t i1 = 0; i1 < x->ne[1]; i1++) row(i1, i2, i3, i1, i2, i3);
        p.panels.push_back({w->data, 0, (int64_t)p.rows.size()});
        return p;
    }
    // experts: y[.., u, t] = w[ids[u, t]] x[.., u % x.ne1, t]; the rows of an expert share its weights
    const ggml_tensor *ids = op->src[2];
    const size_t expert = packed_bytes(w->type, w->ne[0], w->ne[1]);
    static thread_local std::vector<std::pair<int32_t, int64_t>> chosen_by;
    chosen_by.clear();
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t u = 0; u < ids->ne[0]; u++) {
            const int32_t e = *(const int32_t *)((const char *)ids->data + t * ids->nb[1] + u * ids->nb[0]);
            if (e >= 0 && e < w->ne[2]) chosen_by.push_back({e, t * ids->ne[0] + u});
        }
    std::sort(chosen_by.begin(), chosen_by.end());
    for (const auto &[e, at] : chosen_by) {
        if (p.panels.empty() || p.panels.back().weights != (const char *)w->data + e * expert)
            p.panels.push_back({(const char *)w->data + e * expert, (int64_t)p.rows.size(), 0});
        p.panels.back().count++;
        const int64_t u = at % ids->ne[0], t = at / ids->ne[0];
        row(u % x->ne[1], t, 0, u, t, 0);
    }
    return p;
}

// True if a tensor was computed from a product of ours: so it belongs to a model that has our weights.
bool descends_from_ours(const ggml_tensor *t) {
    for (int steps = 0; t && steps < 32; steps++) {
        if (is_product(t)) return true;
        t = t->op == op_mul_mat ? t->src[1] : t->src[0];
    }
    return false;
}

bool is_attention(const ggml_tensor *op) {
    if (op->op != op_attention) return false;
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    const auto readable = [](const ggml_tensor *t) { return t->type == F16 || t->type == F32 || traits_of(t->type)->to_float; };
    return q->type == F32 && q->nb[0] == sizeof(float) && readable(k) && readable(v) && k->ne[2] == v->ne[2] &&
           q->ne[2] % k->ne[2] == 0 && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] &&
           (!mask || (mask->type == F16 && mask->ne[2] == 1 && mask->ne[3] == q->ne[3])) && descends_from_ours(q);
}

Attention attention_of(const ggml_tensor *op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    const auto place = [](const ggml_tensor *t) { return Place{(char *)t->data, t->nb[1], t->nb[2], t->nb[3]}; };
    const auto copied = [](const void *from, float *to, int64_t n) { memcpy(to, from, (size_t)n * sizeof(float)); };
    const auto floats = [&](const ggml_tensor *t) -> void (*)(const void *, float *, int64_t) {
        return t->type == F16 ? nullptr : t->type == F32 ? copied : traits_of(t->type)->to_float;
    };
    Attention a{};
    a.rows = q->ne[1], a.heads = q->ne[2], a.key_heads = k->ne[2], a.cells = k->ne[1], a.streams = q->ne[3];
    a.values = k->ne[0], a.out_values = v->ne[0];
    memcpy(&a.scale, &op->op_params[0], 4);
    memcpy(&a.max_bias, &op->op_params[1], 4);
    memcpy(&a.softcap, &op->op_params[2], 4);
    if (a.softcap != 0) a.scale /= a.softcap;
    a.query = place(q), a.key = place(k), a.value = place(v);
    a.out = {(char *)op->data, op->nb[2], op->nb[1], op->nb[3]};
    a.key_floats = floats(k), a.value_floats = floats(v);
    if (mask) a.mask = (const uint16_t *)mask->data, a.mask_row = mask->nb[1], a.mask_stream = mask->nb[3];
    if (sinks) a.sinks = (const float *)sinks->data;
    return a;
}

struct Traits : ggml::cpu::tensor_traits {
    bool work_size(int threads, const ggml_tensor *op, size_t &size) override {
        if (op->op == op_attention) {
            size = attention_of(op).memory(threads) + 64;
            return true;
        }
        const ggml_tensor *rows = op->op == op_mul_mat ? op->src[1] : op->src[2];
        const int64_t n = op->op == op_mul_mat ? rows->ne[1] * rows->ne[2] * rows->ne[3] : rows->ne[0] * rows->ne[1];
        size = product_memory(op->src[0]->type, op->src[0]->ne[0], n) + 64;
        return true;
    }
    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        char *memory = (char *)(((uintptr_t)params->wdata + 63) / 64 * 64);
        const auto wait = [&] { barrier(params->threadpool); };
        if (op->op == op_attention) {
            if (params->use_ref) return false;
            attention_of(op).compute(*chosen, params->ith, params->nth, memory, wait);
            return true;
        }
        product_of(op).compute(*chosen, params->ith, params->nth, memory, wait);
        return true;
    }
};

struct Door : ggml::cpu::extra_buffer_type {
    Traits traits;
    bool supports_op(void *, const ggml_tensor *op) override {
        if (!is_product(op)) return false;
        const ggml_tensor *w = op->src[0], *x = op->src[1];
        if (!w->data && !offered) return false;  // a loader asks before there is data
        const bool experts = op->op == op_mul_mat_id;
        const TypeFacts *t = facts(w->type);
        return t && chosen->tile[w->type][1] && w->ne[0] % t->stored_values == 0 && w->ne[3] == 1 &&
               (experts || w->ne[2] == 1) && x->type == F32 && x->nb[0] == sizeof(float) && op->nb[0] == sizeof(float);
    }
    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        return is_product(op) || is_attention(op) ? &traits : nullptr;
    }
};

// Memory in large pages where the system has them: a step walks over all of it.
void *allocate(size_t size) {
#ifdef _WIN32
    return nullptr;
#else
    void *p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
    madvise(p, size, MADV_HUGEPAGE);
#endif
    return p;
#endif
}

void set_tensor(ggml_backend_buffer *, ggml_tensor *t, const void *data, size_t offset, size_t) {
    if (offset != 0) {  // loaders write whole tensors
        fprintf(stderr, "specllama kernels: a part of %s was written\n", t->name);
        abort();
    }
    const TypeFacts &f = *facts(t->type);
    const int64_t groups = (t->ne[1] + ROWS - 1) / ROWS, all = groups * t->ne[2];
    const size_t from = t->ne[0] / f.stored_values * f.stored_bytes * t->ne[1];
    const size_t to = packed_bytes(t->type, t->ne[0], t->ne[1]);
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        constexpr int64_t SOME = 16;
        for (int64_t at; (at = next.fetch_add(SOME)) < all;)
            for (int64_t g = at; g < std::min(at + SOME, all); g++)
                pack(t->type, (const char *)data + g / groups * from, t->ne[0], t->ne[1],
                     (char *)t->data + g / groups * to, g % groups, g % groups + 1);
    };
    std::vector<std::thread> helpers;
    for (int i = 1; i < packing_threads && i * 64 < all; i++) helpers.emplace_back(work);
    work();
    for (auto &h : helpers) h.join();
}

const char *get_name(ggml_backend_buffer_type *) { return "CPU_SPECLLAMA"; }
size_t get_alignment(ggml_backend_buffer_type *) { return 64; }
size_t get_alloc_size(ggml_backend_buffer_type *, const ggml_tensor *t) {
    return packed_bytes(t->type, t->ne[0], t->ne[1]) * t->ne[2];
}
void free_buffer(ggml_backend_buffer *b) {
#ifndef _WIN32
    munmap(b->context, b->size);
#endif
}
void *get_base(ggml_backend_buffer *b) { return b->context; }
void clear(ggml_backend_buffer *b, uint8_t value) { memset(b->context, value, b->size); }
ggml_backend_buffer *alloc_buffer(ggml_backend_buffer_type *type, size_t size) {
    size = std::max<size_t>(size, 4096);
    void *memory = allocate(size);
    if (!memory) return nullptr;
    const ggml_backend_buffer_i iface = {free_buffer, get_base, nullptr, nullptr, set_tensor, nullptr,
                                         nullptr,     nullptr,  nullptr, clear,   nullptr};
    return buffer_init(type, iface, memory, size);
}

ggml_backend_buffer_type buffer_type = {{get_name, alloc_buffer, get_alignment, nullptr, get_alloc_size, nullptr}, nullptr, nullptr};

const Kernels *named(const char *name) {
    for (int i = 0; all_kernels[i]; i++)
        if (name && *name ? !strcmp(all_kernels[i]->name, name) : all_kernels[i]->runs_here())
            return all_kernels[i]->runs_here() ? all_kernels[i] : nullptr;
    return nullptr;
}

#ifndef _WIN32
struct Library {
    void *handle;
    const char *missing = nullptr;
    template <class F> F get(const char *name) {
        void *found = dlsym(handle, name);
        if (!found && !missing) missing = name;
        return (F)found;
    }
};

// The functions of ggml that make and compute graphs.
struct Graphs {
    struct Init { size_t size; void *memory; bool no_alloc; };
    Library lib;
#define GGML(result, name, ...) result (*name)(__VA_ARGS__) = lib.get<result (*)(__VA_ARGS__)>("ggml_" #name)
    GGML(ggml_context *, init, Init);
    GGML(void, free, ggml_context *);
    GGML(ggml_tensor *, new_tensor_3d, ggml_context *, int, int64_t, int64_t, int64_t);
    GGML(ggml_tensor *, mul_mat, ggml_context *, ggml_tensor *, ggml_tensor *);
    GGML(ggml_tensor *, mul_mat_id, ggml_context *, ggml_tensor *, ggml_tensor *, ggml_tensor *);
    GGML(void *, new_graph, ggml_context *);
    GGML(void, build_forward_expand, void *, ggml_tensor *);
    GGML(ggml_backend_buffer *, backend_alloc_ctx_tensors_from_buft, ggml_context *, ggml_backend_buffer_type *);
    GGML(ggml_backend_buffer *, backend_alloc_ctx_tensors, ggml_context *, void *);
    GGML(void, backend_buffer_free, ggml_backend_buffer *);
    GGML(void, backend_tensor_set, ggml_tensor *, const void *, size_t, size_t);
    GGML(void, backend_tensor_get, const ggml_tensor *, void *, size_t, size_t);
    GGML(void *, backend_cpu_init);
    GGML(void, backend_cpu_set_n_threads, void *, int);
    GGML(int, backend_graph_compute, void *, void *);
    GGML(void, backend_free, void *);
    GGML(ggml_tensor *, flash_attn_ext, ggml_context *, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *, float, float, float);
    GGML(ggml_tensor *, reshape_3d, ggml_context *, ggml_tensor *, int64_t, int64_t, int64_t);
    GGML(ggml_tensor *, permute, ggml_context *, ggml_tensor *, int, int, int, int);
    GGML(void, set_name, ggml_tensor *, const char *);
    GGML(const char *, op_name, int);
    GGML(const char *, type_name, int);
    GGML(size_t, tensor_overhead);
#undef GGML

    struct Input {
        ggml_tensor *tensor;
        const void *data;
        size_t size;
    };

    // Return what ggml computes from packed weights, with two threads. build(context, weights) makes a
    // graph: it returns the result, and fills in the inputs.
    template <class Build>
    std::vector<float> computed(int type, const std::vector<char> &w, int64_t values, int64_t rows, int64_t many, Build build) {
        ggml_context *packed = init({1 << 20, nullptr, true}), *plain = init({1 << 20, nullptr, true});
        void *backend = backend_cpu_init();
        backend_cpu_set_n_threads(backend, 2);
        ggml_tensor *weights = new_tensor_3d(packed, type, values, rows, many);
        ggml_backend_buffer *first = backend_alloc_ctx_tensors_from_buft(packed, &buffer_type);
        backend_tensor_set(weights, w.data(), 0, w.size());
        std::vector<Input> inputs;
        ggml_tensor *out = build(plain, weights, inputs);
        void *graph = new_graph(plain);
        build_forward_expand(graph, out);
        ggml_backend_buffer *second = backend_alloc_ctx_tensors(plain, backend);
        for (const Input &i : inputs) backend_tensor_set(i.tensor, i.data, 0, i.size);
        backend_graph_compute(backend, graph);
        std::vector<float> y((size_t)(out->ne[0] * out->ne[1] * out->ne[2]));
        backend_tensor_get(out, y.data(), 0, y.size() * 4);
        for (ggml_backend_buffer *b : {first, second}) backend_buffer_free(b);
        backend_free(backend);
        for (ggml_context *c : {packed, plain}) free(c);
        return y;
    }

    // True if ggml computes products of packed weights as the reference does, bit for bit. With
    // experts each row uses two of three.
    bool alike(int type, int64_t n, bool experts) {
        constexpr int64_t VALUES = 512, ROWS_EACH = 40, USED = 2;
        const int64_t many = experts ? 3 : 1, used = experts ? USED : 1;
        Random random;
        const std::vector<char> w = random.weights(type, VALUES, ROWS_EACH * many);
        std::vector<float> x((size_t)(n * VALUES)), expected((size_t)(n * used * ROWS_EACH));
        std::vector<int32_t> ids((size_t)(n * used));
        for (float &one : x) one = random.real();
        for (int32_t &one : ids) one = (int32_t)(random.draw() % (uint32_t)many);
        const size_t one_expert = w.size() / (size_t)many;
        for (size_t i = 0; i < ids.size(); i++)
            reference(type, w.data() + ids[i] * one_expert, VALUES, ROWS_EACH, &x[i / (size_t)used * VALUES], 1, &expected[i * ROWS_EACH]);
        const auto build = [&](ggml_context *c, ggml_tensor *weights, std::vector<Input> &inputs) {
            ggml_tensor *rows = experts ? new_tensor_3d(c, F32, VALUES, 1, n) : new_tensor_3d(c, F32, VALUES, n, 1);
            ggml_tensor *which = new_tensor_3d(c, I32, used, n, 1);
            inputs = {{rows, x.data(), x.size() * 4}, {which, ids.data(), ids.size() * 4}};
            return experts ? mul_mat_id(c, weights, rows, which) : mul_mat(c, weights, rows);
        };
        const std::vector<float> y = computed(type, w, VALUES, ROWS_EACH, many, build);
        return !memcmp(y.data(), expected.data(), y.size() * 4);
    }

    // True if attention of n rows with the keys and values of a type, of which each row sees some, is
    // the reference's, bit for bit. Queries come from packed weights, as in a model.
    bool attention_alike(int type, int64_t n) {
        constexpr int64_t VALUES = 64, HEADS = 4, KEY_HEADS = 2, CELLS = 192, INPUTS = 64;
        Random random;
        const std::vector<char> w = random.weights(Q8_0, INPUTS, VALUES * HEADS), cells = random.weights(type, VALUES, CELLS * KEY_HEADS);
        std::vector<float> x((size_t)(n * INPUTS)), q((size_t)(n * VALUES * HEADS)), expected(q.size());
        std::vector<uint16_t> seen((size_t)(n * CELLS));
        for (float &one : x) one = random.real();
        for (uint16_t &one : seen) one = random.draw() % 3 ? 0 : 0xfc00;
        reference(Q8_0, w.data(), INPUTS, VALUES * HEADS, x.data(), n, q.data());
        Attention a{};
        const auto build = [&](ggml_context *c, ggml_tensor *weights, std::vector<Input> &inputs) {
            ggml_tensor *rows = new_tensor_3d(c, F32, INPUTS, n, 1), *mask = new_tensor_3d(c, F16, CELLS, n, 1);
            ggml_tensor *kv = new_tensor_3d(c, type, VALUES, CELLS, KEY_HEADS);
            inputs = {{rows, x.data(), x.size() * 4}, {mask, seen.data(), seen.size() * 2}, {kv, cells.data(), cells.size()}};
            ggml_tensor *query = permute(c, reshape_3d(c, mul_mat(c, weights, rows), VALUES, HEADS, n), 0, 2, 1, 3);
            ggml_tensor *out = flash_attn_ext(c, query, kv, kv, mask, 0.125f, 0, 0);
            a = attention_of(out);
            return out;
        };
        const std::vector<float> y = computed(Q8_0, w, INPUTS, VALUES * HEADS, 1, build);
        a.query = {(char *)q.data(), VALUES * HEADS * 4, VALUES * 4, 0};
        a.key.data = a.value.data = const_cast<char *>(cells.data());
        a.mask = seen.data();
        a.out.data = (char *)expected.data();
        reference(a);
        return !memcmp(y.data(), expected.data(), y.size() * 4);
    }
};

// Compare the structs above with those of the library: null, or what differs.
const char *compare(Graphs &ggml) {
    if (ggml.lib.missing) return ggml.lib.missing;
    static const std::pair<int, const char *> names[] = {
        {F32, "f32"},   {F16, "f16"},   {Q4_0, "q4_0"}, {Q4_1, "q4_1"}, {Q5_0, "q5_0"},     {Q5_1, "q5_1"},     {Q8_0, "q8_0"},  {Q2_K, "q2_K"},
        {Q3_K, "q3_K"}, {Q4_K, "q4_K"}, {Q5_K, "q5_K"}, {Q6_K, "q6_K"}, {IQ4_NL, "iq4_nl"}, {IQ4_XS, "iq4_xs"}, {BF16, "bf16"},  {MXFP4, "mxfp4"}};
    for (const auto &[type, name] : names) {
        const ggml_type_traits *t = traits_of(type);
        if (strcmp(ggml.type_name(type), name)) return "numbers of types";
        if (strcmp(t->type_name, name) || t->blck_size != facts(type)->stored_values || t->type_size != (size_t)facts(type)->stored_bytes)
            return "layout of types";
    }
    if (ggml.tensor_overhead() != sizeof(ggml_tensor) + 32) return "size of tensors";
    ggml_context *ctx = ggml.init({1 << 16, nullptr, true});
    ggml_tensor *w = ggml.new_tensor_3d(ctx, Q4_0, 64, 48, 3), *one = ggml.new_tensor_3d(ctx, Q4_0, 64, 48, 1);
    ggml_tensor *x = ggml.new_tensor_3d(ctx, F32, 64, 2, 5), *ids = ggml.new_tensor_3d(ctx, I32, 2, 5, 1);
    ggml.set_name(w, "a name");
    ggml_tensor *y = ggml.mul_mat(ctx, one, x), *z = ggml.mul_mat_id(ctx, w, x, ids);
    const float scale = 0.5f;
    ggml_tensor *q = ggml.new_tensor_3d(ctx, F32, 64, 2, 4), *k = ggml.new_tensor_3d(ctx, F16, 64, 32, 2);
    ggml_tensor *mask = ggml.new_tensor_3d(ctx, F16, 32, 64, 1);
    ggml_tensor *a = ggml.flash_attn_ext(ctx, q, k, k, mask, scale, 0, 0);
    const bool same = w->type == Q4_0 && w->ne[0] == 64 && w->ne[1] == 48 && w->ne[2] == 3 && w->nb[1] == 36 && w->nb[2] == 48 * 36 &&
                      !w->buffer && !w->data && !w->view_src && !strcmp(w->name, "a name") && y->src[0] == one && y->src[1] == x &&
                      y->ne[0] == 48 && y->ne[1] == 2 && y->ne[2] == 5 && z->src[0] == w && z->src[1] == x && z->src[2] == ids &&
                      a->src[0] == q && a->src[1] == k && a->src[2] == k && a->src[3] == mask && !memcmp(a->op_params, &scale, 4) &&
                      a->ne[0] == 64 && a->ne[1] == 4 && a->ne[2] == 2 && !strcmp(ggml.op_name(a->op), "FLASH_ATTN_EXT") &&
                      !strcmp(ggml.op_name(y->op), "MUL_MAT") && !strcmp(ggml.op_name(z->op), "MUL_MAT_ID");
    op_mul_mat = y->op, op_mul_mat_id = z->op, op_attention = a->op;
    ggml.free(ctx);
    return same ? nullptr : "layout of tensors";
}
#endif

} // namespace

// The best instruction set of this processor, or the one of this name; null: it cannot run here.
API const char *specllama_kernels_set(const char *name) {
    const Kernels *k = named(name);
    return k ? k->name : nullptr;
}

// Push the entry to the list of the library behind `handle` (of dlopen). Null: done (again: nothing
// is done). Else a text: why not, and nothing was changed.
API const char *specllama_kernels_install(void *handle, const char *name, int threads) {
#ifdef _WIN32
    return "ggml exports no list of buffer types on Windows";
#else
    if (buffer_type.context) return nullptr;
    const Kernels *k = named(name);
    if (!k) return "this processor has none of the instruction sets";
    Graphs ggml{{handle}};
    Library &lib = ggml.lib;
    const auto list = lib.get<std::vector<ggml_backend_buffer_type *> &(*)()>("_Z39ggml_backend_cpu_get_extra_buffer_typesv");
    const auto reg = lib.get<void *(*)()>("ggml_backend_cpu_reg");
    const auto device = lib.get<void *(*)(void *, size_t)>("ggml_backend_reg_dev_get");
    barrier = lib.get<void (*)(ggml_threadpool *)>("ggml_barrier");
    traits_of = lib.get<decltype(traits_of)>("ggml_get_type_traits");
    buffer_init = lib.get<decltype(buffer_init)>("ggml_backend_buffer_init");
    if (lib.missing) return lib.missing;
    if (const char *other = compare(ggml)) return other;
    chosen = k;
    packing_threads = threads;
    static Door door;
    buffer_type.device = device(reg(), 0);
    buffer_type.context = &door;
    auto &all = list();
    all.insert(all.begin(), &buffer_type);
    offered = true;
    return nullptr;
#endif
}

// Offer the kernels to models that are loaded from now on, or do not.
API void specllama_kernels_offer(int yes) { offered = yes != 0; }

// Compute small products of every type through ggml's own graphs, and compare them with the scalar
// reference. Each step is logged before it begins: a process that dies shows where. 0: all alike.
API int specllama_kernels_check(void *handle) {
#ifndef _WIN32
    Graphs graphs{{handle}};
    if (graphs.lib.missing) return 1;
    for (int type : ALL_TYPES)
        for (int n : {1, 3, 9, -5}) {  // -5: rows that use experts
            printf("type %d, %d rows%s\n", type, abs(n), n < 0 ? " with experts" : "");
            fflush(stdout);
            if (!graphs.alike(type, abs(n), n < 0)) return 1;
        }
    for (int type : {F16, Q8_0, Q4_0, BF16, F32})
        for (int n : {1, 5, 33}) {
            printf("attention over cells of type %d, %d rows\n", type, n);
            fflush(stdout);
            if (!graphs.attention_alike(type, n)) return 1;
        }
#endif
    return 0;
}

} // namespace specllama
