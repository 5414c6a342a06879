//! Buffers of mixtures of experts, and the tiles of their steps.

use paguro_backend::{Experts, Limits, LoadError};

use crate::{
    device::Device,
    layout::BLOCK,
    lower::{When, kernels, launch::ExpertTiles},
    ops::Program,
};

/// Elements of a row that experts read.
pub(super) fn row_width(experts: &Experts, hidden: usize) -> usize {
    experts.latent.map_or(hidden, |latent| latent.width)
}

/// Fewest rows of a step with tiles of cooperative matrices.
const TILED_ROWS: usize = 17;

/// Room for the mixtures of experts of a program: of each kind of buffer, that of the one that needs most.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::lower) struct Room {
    /// Blocks of activations between up and down.
    pub act_blocks: usize,
    /// Elements of gates and inputs.
    gate_up: usize,
    /// Elements of results.
    results: usize,
    /// Elements of logits.
    logits: usize,
    /// Rows and experts of each.
    pairs: usize,
    /// Places of tiles.
    places: usize,
    /// Tiles.
    tiles: usize,
    /// Elements of results of a network beside experts.
    shared: usize,
    /// Elements of sums of experts, where a norm or a matmul precedes their addition.
    sum: usize,
    /// Elements of rows of the experts' own width.
    narrow: usize,
    /// The widest of these rows.
    pub narrow_width: usize,
    /// Rows, if there are any experts.
    rows: usize,
    /// Words of activations in half precision, in the order of places.
    halves: usize,
}

/// Buffers of mixtures of experts, which layers use one after the other.
pub(in crate::lower) struct Buffers {
    pub(super) logits: wgpu::Buffer,
    pub(super) chosen: wgpu::Buffer,
    pub(super) weights: wgpu::Buffer,
    pub(super) places: wgpu::Buffer,
    pub(super) sources: wgpu::Buffer,
    pub(super) tile_experts: wgpu::Buffer,
    pub(super) results: wgpu::Buffer,
    pub(super) shared: wgpu::Buffer,
    pub(super) sum: wgpu::Buffer,
    /// `[rows, latent width]`: inputs of experts of their own width, later the sums of their outputs.
    pub(super) narrow: wgpu::Buffer,
    pub(super) output_gate: wgpu::Buffer,
    pub(super) halves: Option<wgpu::Buffer>,
}

/// Distribution of the rows of a step to experts.
#[derive(Clone, Copy)]
pub(super) struct Shares {
    /// Rows from which on they are grouped by expert.
    tiled_from: usize,
    /// Rows from which on their tiles are long.
    long_from: usize,
    /// Short and long tiles.
    pub(super) tiles: [ExpertTiles; 2],
}

impl Shares {
    pub(super) fn of(device: &Device, experts: &Experts, limits: &Limits) -> Self {
        let (count, used) = (experts.count, experts.router.used);
        // With fewer than two rows for each expert, a tile is mostly empty.
        let tiled_from = (2 * count / used).max(2);
        let tiled_from = match device.cooperative {
            // All tiles have cooperative matrices. Other kernels for few rows would save less time than they cost.
            Some(_) => tiled_from.max(TILED_ROWS),
            None => tiled_from,
        };
        let [short, long] = kernels::tile_rows(device, limits.max_rows * used / count);
        // The number of rows at which the average expert fills a short tile.
        let long_from =
            if short == long { tiled_from } else { tiled_from.max(short as usize * count / used) };
        let tiles = |tile| ExpertTiles { count: count as u32, used: used as u32, tile };
        Self { tiled_from, long_from, tiles: [tiles(short), tiles(long)] }
    }

    /// Returns one value for steps of few rows and one for each kind of tiles.
    pub(super) fn variants<T>(self, few: T, tiled: impl Fn(ExpertTiles) -> T) -> Vec<(When, T)> {
        let [short, long] = self.tiles;
        let mut variants = vec![(When::Between(0, self.tiled_from), few)];
        if self.tiled_from < self.long_from {
            variants.push((When::Between(self.tiled_from, self.long_from), tiled(short)));
        }
        variants.push((When::From(self.long_from), tiled(long)));
        variants
    }

    /// Returns the largest number of tiles in steps of up to `rows` rows, and the largest number of places in tiles.
    pub(super) fn most(self, rows: usize) -> [usize; 2] {
        let [short, long] = self.tiles;
        let of = |tiles: ExpertTiles, rows: usize| {
            let most = tiles.most(rows as u32) as usize;
            [most, most * tiles.tile as usize]
        };
        let ([tiles, places], [more, longer]) = (of(short, rows.min(self.long_from)), of(long, rows));
        [tiles.max(more), places.max(longer)]
    }
}

impl Room {
    pub(in crate::lower) fn of(device: &Device, program: &Program, limits: &Limits) -> Self {
        let mut room = Self::default();
        for experts in program.experts() {
            let (rows, hidden, width) = (limits.max_rows, program.hidden, experts.width);
            let narrow_width = experts.latent.map_or(0, |latent| latent.width);
            let read = row_width(experts, hidden);
            let pairs = rows * experts.router.used;
            let [tiles, places] = Shares::of(device, experts, limits).most(rows);
            let places = places.max(pairs);
            let own = Self {
                act_blocks: places * width.div_ceil(BLOCK),
                gate_up: places * width,
                results: places * read,
                logits: rows * experts.count,
                pairs,
                places,
                tiles,
                shared: if experts.shared.is_some() || experts.beside.is_some() { rows * hidden } else { 0 },
                sum: if experts.beside.is_some() || narrow_width > 0 { rows * hidden } else { 0 },
                narrow: rows * narrow_width,
                narrow_width,
                rows,
                halves: match device.cooperative {
                    Some(_) => (places * read.div_ceil(BLOCK) + BLOCK) * 16,
                    None => 0,
                },
            };
            room = Self {
                act_blocks: room.act_blocks.max(own.act_blocks),
                gate_up: room.gate_up.max(own.gate_up),
                results: room.results.max(own.results),
                logits: room.logits.max(own.logits),
                pairs: room.pairs.max(own.pairs),
                places: room.places.max(own.places),
                tiles: room.tiles.max(own.tiles),
                shared: room.shared.max(own.shared),
                sum: room.sum.max(own.sum),
                narrow: room.narrow.max(own.narrow),
                narrow_width: room.narrow_width.max(own.narrow_width),
                rows,
                halves: room.halves.max(own.halves),
            };
        }
        room
    }

    /// Elements of the buffers of matmuls: of queries, keys and values, of gates and inputs.
    pub(in crate::lower) fn scratch(&self, rows: usize, [q, kv, ffn]: [usize; 3]) -> [usize; 3] {
        [
            (rows * (q + 2 * kv).max(2 * ffn)).max(2 * self.gate_up),
            (rows * (q.max(kv) + kv).max(ffn)).max(self.gate_up),
            rows * kv,
        ]
    }

    /// Words of [`Buffers`].
    pub(in crate::lower) fn words(&self) -> usize {
        let Self { logits, pairs, places, tiles, results, shared, sum, narrow, .. } = self;
        logits + 3 * pairs + places + tiles + results + shared + sum + narrow + self.rows + self.halves
    }

    /// Allocates them, if there are experts.
    pub(in crate::lower) fn buffers(&self, device: &Device) -> Result<Option<Buffers>, LoadError> {
        if self.rows == 0 {
            return Ok(None);
        }
        let buffer = |words: usize, what: &str| device.buffer(words, what);
        Ok(Some(Buffers {
            logits: buffer(self.logits, "logits of routers")?,
            chosen: buffer(self.pairs, "chosen experts")?,
            weights: buffer(self.pairs, "weights of experts")?,
            places: buffer(self.pairs, "places of experts")?,
            sources: buffer(self.places, "places of experts")?,
            tile_experts: buffer(self.tiles, "places of experts")?,
            results: buffer(self.results, "results of experts")?,
            shared: buffer(self.shared, "results of shared experts")?,
            sum: buffer(self.sum, "sums of experts")?,
            narrow: buffer(self.narrow, "rows of experts")?,
            output_gate: buffer(self.rows, "gates of shared experts")?,
            halves: match self.halves {
                0 => None,
                words => Some(buffer(words, "activations of experts")?),
            },
        }))
    }
}
