// Prints llama.cpp's logits: all in f32 where the weights are (no flash attention, K and V in f32).
//
// usage: logits MODEL.gguf CONTEXT OUT.f32 POSITION,POSITION,... [rows|mean|rank] TOKEN...
// All tokens are one batch; the logits of the positions are written one after the other. With `rows`, it is the embeddings of the
// positions; with `mean`, one vector: the mean of all, after the model's dense layers; with `rank`, the numbers of the classifier; with
// `head`, the logits of the head for multi-token prediction, which reads each token beside the model's row of the token before. Its
// positions count from the second token. With `assistant FILE`, the logits of an assistant of the model at each position: of the token
// there, beside the model's row of the token before; and then of the token before, beside the row that the assistant has made, at the
// same position.
#include "llama.h"
#include "../src/llama-ext.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

int main(int argc, char ** argv) {
    if (argc < 6) { std::fprintf(stderr, "usage: logits MODEL CONTEXT OUT POSITIONS TOKEN...\n"); return 2; }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
    }, nullptr);
    llama_backend_init();

    llama_model_params model_params = llama_model_default_params();
    model_params.use_extra_bufts = false; // no repacking: the plain kernels
    model_params.load_mtp = std::string(argv[5]) == "head";
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (!model) return 1;

    std::vector<llama_token> tokens;
    const std::string kind = argv[5];
    const bool rows = kind == "rows", mean = kind == "mean", rank = kind == "rank", head = kind == "head";
    const bool assistant = kind == "assistant";
    for (int i = assistant ? 7 : rows || mean || rank || head ? 6 : 5; i < argc; i++) tokens.push_back(std::atoi(argv[i]));

    llama_context_params params = llama_context_default_params();
    params.n_ctx = std::atoi(argv[2]);
    params.n_batch = params.n_ubatch = tokens.size();
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.embeddings = rows || mean || rank;
    params.pooling_type = mean ? LLAMA_POOLING_TYPE_MEAN : rank ? LLAMA_POOLING_TYPE_RANK : LLAMA_POOLING_TYPE_NONE;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return 1;
    if ((int) llama_n_ctx(context) != std::atoi(argv[2])) {
        std::fprintf(stderr, "the context became %u tokens\n", llama_n_ctx(context));
        return 1;
    }

    if (head || assistant) llama_set_embeddings_nextn(context, true, false);
    if (assistant) {
        llama_model * other = llama_model_load_from_file(argv[6], model_params);
        if (!other) return 1;
        params.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
        params.ctx_other = context;
        llama_context * drafting = llama_init_from_model(other, params);
        if (!drafting) return 1;
        llama_set_embeddings_nextn(drafting, true, true);
        FILE * out = std::fopen(argv[3], "wb");
        const size_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(model)), width = llama_model_n_embd(model);
        std::stringstream positions(argv[4]);
        size_t done = 0;
        for (std::string position; std::getline(positions, position, ',');) {
            // The model has computed the tokens before the position.
            const size_t at = std::stoi(position);
            llama_batch batch = llama_batch_init(at - done, 0, 1);
            batch.n_tokens = at - done;
            for (size_t i = done; i < at; i++) {
                batch.token[i - done] = tokens[i];
                batch.pos[i - done] = i;
                batch.n_seq_id[i - done] = 1;
                batch.seq_id[i - done][0] = 0;
                batch.logits[i - done] = true;
            }
            if (llama_decode(context, batch) != 0) return 1;
            const float * last = llama_get_embeddings_nextn_ith(context, at - done - 1);
            std::vector<float> row(last, last + width);
            for (size_t token : { at, at - 1 }) {
                llama_batch_ext * joined = llama_batch_ext_init(drafting);
                const int32_t index = llama_batch_ext_add_token(joined, 0, tokens[token]);
                const llama_embd given = { row.data(), 1, width };
                const llama_pos pos = at;
                if (!llama_batch_ext_set_embd_token(joined, index, given)) return 1;
                if (!llama_batch_ext_set_pos(joined, index, &pos)) return 1;
                if (!llama_batch_ext_set_output_logits(joined, index, true)) return 1;
                if (llama_process(drafting, LLAMA_PROCESS_TYPE_DECODE, joined) != 0) return 1;
                std::fwrite(llama_get_logits_ith(drafting, index), sizeof(float), vocab, out);
                last = llama_get_embeddings_nextn_ith(drafting, index);
                row.assign(last, last + width);
            }
            done = at;
        }
        return std::fclose(out);
    }

    llama_batch batch = llama_batch_init(tokens.size(), 0, 1);
    batch.n_tokens = tokens.size();
    for (size_t i = 0; i < tokens.size(); i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = true;
    }
    if (llama_decode(context, batch) != 0) return 1;

    const size_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE * out = std::fopen(argv[3], "wb");
    const size_t width = llama_model_n_embd(model);
    if (mean) {
        std::fwrite(llama_get_embeddings_seq(context, 0), sizeof(float), width, out);
        return std::fclose(out);
    }
    if (rank) {
        std::fwrite(llama_get_embeddings_seq(context, 0), sizeof(float), llama_model_n_cls_out(model), out);
        return std::fclose(out);
    }
    llama_context * of_logits = context;
    if (head) {
        params.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
        params.ctx_other = context;
        of_logits = llama_init_from_model(model, params);
        if (!of_logits) return 1;
        llama_batch_ext * joined = llama_batch_ext_init(of_logits);
        for (size_t i = 1; i < tokens.size(); i++) {
            const int32_t at = llama_batch_ext_add_token(joined, 0, tokens[i]);
            const llama_embd row = { llama_get_embeddings_nextn_ith(context, i - 1), 1, width };
            const llama_pos position = i - 1;
            if (!llama_batch_ext_set_embd_token(joined, at, row)) return 1;
            if (!llama_batch_ext_set_pos(joined, at, &position)) return 1;
            if (!llama_batch_ext_set_output_logits(joined, at, true)) return 1;
        }
        if (llama_process(of_logits, LLAMA_PROCESS_TYPE_DECODE, joined) != 0) return 1;
    }
    std::stringstream positions(argv[4]);
    for (std::string position; std::getline(positions, position, ',');) {
        const int at = std::stoi(position);
        const float * row = rows ? llama_get_embeddings_ith(context, at) : llama_get_logits_ith(of_logits, head ? at - 1 : at);
        std::fwrite(row, sizeof(float), rows ? width : vocab, out);
    }
    return std::fclose(out);
}
