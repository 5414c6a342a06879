//! Model files, tokenizers and chat templates; lowering a model to a Program.
