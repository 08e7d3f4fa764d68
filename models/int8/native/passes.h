// The functions that Python calls (`library.py`): a model's weights, engines over them, and a pass of tokens through its layers.
// Those that return int return 0, or 1 for lack of memory or threads. Arguments are copied, but an engine refers to its model.
#pragma once

#include <cstdint>

extern "C" {

struct Sizes {
    int32_t layers, heads, key_heads, head, width, inner, words, context;
    int32_t bytes;  // 1: states are rounded to 8 bits; 0: to at most 16
    int32_t block;  // states after the gate are rotated in blocks of this size, by a Hadamard matrix; 0: they are not
    float epsilon;
};

// Tokens that follow `held` others. `cells`: keys and values of these others, from earlier passes, [2 layers, ., kept], planes
// `plane` numbers apart; a cell is numbers of 16 bits, those of the heads and two for each head's scale. In the pass the tree's
// tokens are `first` to `first + count`; `sees` [count, count]: which of them each one sees.
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
    const int64_t* wanted;  // the tokens whose results are wanted
    float* answers;         // their results [answering, words or width]
    int16_t* cells;         // keys and values of all tokens [2 layers, tokens, kept]
    int32_t tokens, tree_count, answering, layers;
    int32_t states;  // 1: the results are the states after the layers; 0: logits
};

struct Model;
struct Engine;

// Return the hash of the sources that this was compiled from, set by the build hook.
const char* passes_sources();
int passes_model(const Sizes* sizes, Model** made);
void passes_model_free(Model* model);
// Pack a layer: its vectors and matrices in 32 bits, [outputs, inputs], rotated (`files/rotation.py`); the rotary embedding pairs
// the halves of a head, and queries are scaled.
int passes_layer(Model* model, int32_t layer, const float* norm, const float* query, const float* key, const float* value,
                 const float* output, const float* inner_norm, const float* gate, const float* up, const float* down);
// Pack what is around the layers: embedding, last norm, head, and cosines and sines of the rotary embedding [context, head / 2].
int passes_ends(Model* model, const float* embedding, const float* norm, const float* head, const float* cosines, const float* sines);
// For tests and benchmarks: multiply states [rows, depth] by weights [columns, depth]. `seconds`: best repeat, without rounding.
int passes_product(const float* states, const float* weights, int32_t rows, int32_t columns, int32_t depth, int32_t bytes,
                   int32_t threads, int32_t repeats, float* answers, double* seconds);
int passes_engine(const Model* model, int32_t threads, Engine** made);
void passes_engine_free(Engine* engine);
void passes_engine_wake(Engine* engine);
int passes_run(Engine* engine, const Pass* pass);
}
