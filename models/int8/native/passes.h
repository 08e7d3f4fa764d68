// What Python calls (`integer_library.py`): a model's weights, engines over them, and a pass of tokens through its layers.
// Every function but those that free returns 0, or 1 where there was no memory; `of` takes ownership of nothing.
#pragma once

#include <cstdint>

extern "C" {

struct Sizes {
    int32_t layers, heads, key_heads, head, width, inner, words, context;
    int32_t bytes;  // states are rounded to 8 bits, else to at most 16
    int32_t block;  // states after the gate are turned in blocks of so many, by Hadamard's matrix; 0: they are not
    float epsilon;
};

// Tokens that stand behind `held` others, whose keys and values are [2 layers, ., kept], `plane` numbers apart: of each what a
// pass left of it in its `cells`, numbers of 16 bits, those of the heads and two for each head's scale. In the pass they are
// `first` to `first + count`; `sees` [count, count] tells which of them each one sees.
struct Tree {
    const int16_t* cells;
    const uint8_t* sees;
    int64_t plane;
    int32_t held, first, count;
};

struct Pass {
    const int64_t* ids;
    const int64_t* positions;
    const Tree* trees;
    const int64_t* wanted;  // which tokens answer
    float* answers;         // [answering, words or width]
    int16_t* cells;         // keys and values of all tokens [2 layers, tokens, kept]
    int32_t tokens, tree_count, answering, layers;
    int32_t states;  // those after the layers are the answer, else logits
};

struct Model;
struct Engine;

// Of which sources this was made, as the build hook says it.
const char* passes_sources();
int passes_model(const Sizes* sizes, Model** made);
void passes_model_free(Model* model);
// A layer's vectors and matrices in 32 bits, [outputs, inputs], turned (`turning.py`); heads of queries and keys turn by halves, queries are scaled.
int passes_layer(Model* model, int32_t layer, const float* norm, const float* query, const float* key, const float* value,
                 const float* output, const float* inner_norm, const float* gate, const float* up, const float* down);
// What stands around the layers; the embedding is copied, the head packed. Rotations are [context, head / 2].
int passes_ends(Model* model, const float* embedding, const float* norm, const float* head, const float* cosines, const float* sines);
// For tests and benchmarks: states [rows, depth] times weights [columns, depth], as passes multiply them; `seconds`: what the
// quickest of so many repeats took, without rounding either of them.
int passes_product(const float* states, const float* weights, int32_t rows, int32_t columns, int32_t depth, int32_t bytes,
                   int32_t threads, int32_t repeats, float* answers, double* seconds);
int passes_engine(const Model* model, int32_t threads, Engine** made);
void passes_engine_free(Engine* engine);
void passes_engine_wake(Engine* engine);
int passes_run(Engine* engine, const Pass* pass);
}
