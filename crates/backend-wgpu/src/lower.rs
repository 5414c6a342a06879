//! A program as launches, by passes over data. None of them knows shaders or a graphics interface: `emit` comes after them.
//!
//! | pass | from | to |
//! |-|-|-|
//! | [`build`] | the program, and a class of rows | [nodes](node), one for each operation; the sizes of all [slots](slot) |
//! | [`fuse`] | nodes | fewer nodes, by a list of rules |
//! | [`pool`] | nodes | the same with copies of experts that have no slot |
//! | [`adapt`] | nodes | with adapters (LoRA), one more before each matmul that they change |
//! | [`formats`] | nodes | the same with the formats of activations, which their readers determine |
//! | [`sync`] | nodes | the same with barriers, or handoff |
//!
//! An operation's launches, by the number of rows of a step. *Few* rows are two and more without, *many* those with cooperative
//! matrices, or for experts with tiles. An arrow names the rule that fuses an operation with another one.
//!
//! | operation | kernel | one row | few rows | many rows |
//! |-|-|-|-|-|
//! | embedding | `embed.wgsl` | 1 | 1 | 1 |
//! | embeddings joined with given rows | `embed.wgsl`, `add_given.wgsl`, `norm.wgsl` and `map_rows.wgsl` for both, `norm.wgsl`, a matmul | 8 | 8 | 8 |
//! | given rows without embeddings | `add_given.wgsl` | 1 | 1 | 1 |
//! | later parts of given rows | `add_given.wgsl` | 0 | 0 or 1 | 0 or 1 |
//! | operations of towers on rows | `norm.wgsl`, a matmul, `map_rows.wgsl` | 1 each | the same | the same |
//! | a matmul with bounds | `map_rows.wgsl`, `norm.wgsl`, a matmul, `map_rows.wgsl`; behind attention, `unpack.wgsl` | 4 or 5 | the same | the same |
//! | norm | `norm.wgsl` | → `norm_in_matmul` | 1 | 1 |
//! | matmul | `matvec.wgsl`, `matmul.wgsl`, `coop.wgsl` | 1 for each layout of its matrices | the same | the same |
//! | rotation, K and V into pages | `rope_store.wgsl`; without norms, `rope_store_words.wgsl` | → `rope_in_matmul`, or 1 | 1 | 1 |
//! | attention | `attend.wgsl`, `attend_few.wgsl`, `attend_coop.wgsl` | 1 | 1 for each kind of tile | the same |
//! | its merge | `attend_merge.wgsl` | 0 or 1 | 0 or 1 | 0 or 1 |
//! | activation of a network | `activate.wgsl` | → `gate_in_matmul` | 1 | → `gate_in_coop`, `activation_in_coop` |
//! | addition of a branch | `add_branch.wgsl` | → `add_directly`, `norm_sum` | the same | the same |
//! | router | matmul, `route.wgsl`, `route_tiles.wgsl` | 1, → `choice_in_experts` | 2 | 3 |
//! | places of experts in slots | `place_experts.wgsl` | 1 | 1 | 1 |
//! | copies of experts | `fill_experts.wgsl` | 1 for each matmul | the same | the same |
//! | gate and up of experts, down | matmul of each row's experts or of tiles | 2 | 2 | 2, and `gather_halves.wgsl` |
//! | their activation | `activate.wgsl` | → `gate_in_experts` | 1 | 1 |
//! | their sum | `sum_experts.wgsl` in `sum_matvec.wgsl`, `norm.wgsl` or `add_experts.wgsl` | → `sum_in_experts` | → `norm_experts`; 1 in the last layer | the same |
//! | short convolution | `short_conv.wgsl`, `keep.wgsl` | 2 | 2 | 2 |
//! | delta rule | `delta_inputs.wgsl`, `delta.wgsl`, `delta_norm.wgsl`, `keep.wgsl` | 4 | 4 | 4 |
//! | scan | `ssd_inputs.wgsl`, `delta.wgsl`, `ssd_norm.wgsl`, `keep.wgsl` | 4 | 4 | 4 |
//! | latent attention, beside attention | `rope_store.wgsl`, `latent_queries.wgsl`, two matmuls of heads | 4 | 4 | 4 |
//! | embeddings for layers | `layer_embeds.wgsl` | 1 | 1 | 1 |
//! | means of rows, of encoders | `mean_rows.wgsl` | 1 | 1 | 1 |
//! | products with A of adapters, before a matmul, with handoff beside it | `matvec.wgsl`, `coop.wgsl` with `shrink.wgsl` | 1 | 1 | 1 |
//! | products with B | `change.wgsl` in the matmul | 0 | 0 | 0 |

mod adapt;
mod attention_tiles;
mod build;
mod facts;
mod formats;
mod fuse;
pub mod kernels;
mod node;
mod pool;
mod slot;
mod sync;

use paguro_backend::LoadError;

pub use self::{
    adapt::{Adapted, MATRICES, Site, sites},
    attention_tiles::{GROUP_QUERIES, THREADS, TOKENS, few_works, wide_bytes, wide_tiles},
    facts::Facts,
    kernels::{ExpertTiles, exact_rows},
    node::*,
    slot::{Sizes, Slot, StatePart},
    sync::MOST_QUERIES,
};

/// Rows whose logits are computed at once: bounds their memory for large vocabularies.
pub const LOGIT_ROWS: usize = 64;

/// The nodes of a class of rows.
#[derive(Debug)]
pub struct List {
    /// The class.
    pub class: RowClass,
    /// Nodes of all rows.
    pub body: Vec<Node>,
    /// Nodes of the rows with outputs: their norm, and logits. None of a program that ends with rows.
    pub head: Vec<Node>,
    /// Logits of a step of one row without its own norm, if the last layer computes it.
    pub direct: Option<Node>,
}

/// Lowers a program: the nodes of every class of rows, and the sizes of slots.
///
/// # Errors
/// [`LoadError::Unsupported`]
pub fn lower(facts: &Facts<'_>) -> Result<(Vec<List>, Sizes), LoadError> {
    let mut sizes = Sizes::default();
    let mut lists = Vec::new();
    for class in facts.classes() {
        let mut list = build::Builder::build(facts, class, &mut sizes)?;
        if facts.weights.is_some() {
            fuse::fuse(facts, &mut list);
            pool::pool(&mut list);
            adapt::adapt(facts, &mut list);
            sync::sync(facts, &mut list);
            formats::formats(facts, &mut list);
        }
        lists.push(list);
    }
    adapt::need(facts, &mut sizes);
    sizes.finish();
    Ok((lists, sizes))
}
