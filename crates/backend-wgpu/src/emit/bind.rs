//! Kernels of WGSL as pipelines of wgpu, and slots as its buffers.

use std::{
    collections::{BTreeSet, HashMap, HashSet, hash_map::Entry},
    sync::Arc,
};

use paguro_backend::{Experts, Limits, Linear, LoadError, MatrixId, Mixer, Program, Rope, Weights};

use super::{
    code::{Biases, Code, Coded, Coder, Joined, Part, Slots},
    experts::PLACE_EXPERTS,
    launch::{Grid, HandoffPartials, Head, HeadIo, Io, Kernel, Launch, LayerPool, LayerState, Model},
    wgsl,
};
use crate::{
    device::Device,
    hidden::second_name,
    layout::{BLOCK, Layout},
    lower::{Facts, LOGIT_ROWS, List, Node, RowClass, Sizes, Slot, lower},
    matrix::{DeviceMatrix, Order},
    pages::{self, page_bytes, page_words},
    runner::{kept_words, lanes, page_kernel_words, row_words},
    sampler,
    template::Value::U,
};

/// Steps of any number of rows.
const ALL_ROWS: RowClass = RowClass { from: 1, to: usize::MAX };

/// Returns the bytes of all buffers besides weights, pages and states. A test compares the result with the allocations of a
/// load.
pub fn buffer_bytes(facts: &Facts<'_>) -> u64 {
    let Facts { program, kv, limits, .. } = facts;
    // A load fails with the error, and the number is never used.
    let Ok((_, sizes)) = lower(facts) else { return 0 };
    let ropes: BTreeSet<usize> = program.mixers().filter_map(rope_of).collect();
    let rotations: usize = ropes.into_iter().map(|rope| 2 * facts.pairs(Some(rope))).sum();
    let rotations = rotations * (limits.max_context.div_ceil(256) + 256);
    let page_kernels = match pages::have_kinds(program, kv, limits.kv_dtype) {
        true => {
            let page_bytes = page_bytes(kv, limits.block_size, limits.kv_dtype);
            page_kernel_words(program.state.bytes(), page_bytes, limits)
        }
        false => 0,
    };
    // Rows of logits and of the residual stream on their way to the host.
    let rows = lanes(program) * host_row_words(program, limits)
        + kept_words(program, limits)
        + 2 * row_words(program, limits);
    // Given rows on their way to the device.
    let given = lanes(program) * sizes.words(Slot::Given);
    sizes.bytes() + 4 * (rotations + page_kernels + rows + given) as u64
}

/// Returns the words of the largest slice of outputs for the host: logits, normed rows, rows of the residual stream, and means.
pub fn host_row_words(program: &Program, limits: &Limits) -> usize {
    let (outputs, hidden) = (limits.max_outputs.max(1), program.hidden);
    let means = if program.bidirectional { limits.max_sequences * hidden } else { 0 };
    match program.head() {
        Some(_) => (outputs.min(LOGIT_ROWS) * (program.vocab + 2 * hidden)).max(2 * outputs * hidden) + means,
        None => outputs * program.residual_width(),
    }
}

/// Returns the index of a mixer's rotation.
fn rope_of(mixer: &Mixer) -> Option<usize> {
    match mixer {
        Mixer::Attention(attention) => attention.rope,
        Mixer::Latent(latent) => Some(latent.rope),
        Mixer::None | Mixer::Conv(_) | Mixer::DeltaRule(_) | Mixer::Ssd(_) | Mixer::Sum(_) => None,
    }
}

/// Buffers of a model, which its launches for steps with adapters share.
#[derive(Clone, Default)]
pub struct Bound {
    /// Buffers of slots.
    pub buffers: HashMap<Slot, wgpu::Buffer>,
    /// Second names of buffers whose uses wgpu does not see.
    seconds: HashMap<Slot, wgpu::Buffer>,
    matrices: Vec<DeviceMatrix>,
    joined: Vec<Joined>,
    biases: Vec<Biases>,
    pages: Vec<[wgpu::Buffer; 2]>,
    states: Vec<LayerState>,
    /// Names of the counters.
    pub counters: Vec<String>,
}

/// Binds slots, and compiles nothing yet.
struct Binder<'a> {
    device: &'a Device,
    facts: &'a Facts<'a>,
    weights: &'a Weights,
    bound: Bound,
    /// Slots that were bound before. Steps may use them meanwhile.
    old: HashSet<Slot>,
    /// Counter of the attention that is to be merged next, if it is timed with the merge.
    timed_with: Option<usize>,
}

impl Bound {
    /// Returns the matrices that a program has in common with the one of these buffers. `shared` lists their numbers in both.
    pub fn shared(&self, shared: &[(MatrixId, MatrixId)]) -> Self {
        let whole = |id: MatrixId| Joined { matrices: vec![id], order: Order::Joined, slots: None };
        let of = |&(own, id): &(MatrixId, MatrixId)| {
            let index = self.joined.iter().position(|joined| *joined == whole(id))?;
            Some((whole(own), self.matrices[index].clone()))
        };
        let (joined, matrices) = shared.iter().filter_map(of).unzip();
        Self { joined, matrices, ..Self::default() }
    }
}

/// Emits a program: uploads its weights and allocates its buffers, except those that are bound already, and lists its launches.
///
/// # Errors
/// [`LoadError`]
pub fn emit(device: &Device, facts: &Facts<'_>, weights: &Weights, bound: Bound) -> Result<Model, LoadError> {
    let (lists, sizes) = lower(facts)?;
    let mut coder = Coder::new(facts, &sizes);
    let mut binder = Binder::new(device, facts, weights, &sizes, bound)?;
    (coder.matrices, coder.biases) = (binder.bound.joined.clone(), binder.bound.biases.clone());
    let mut known: HashMap<String, Vec<Arc<Launch>>> = HashMap::new();
    let mut launches = |node: &Node, class: RowClass, coder: &mut Coder<'_>, binder: &mut Binder<'_>| {
        // Classes share the launches that they have in common. Parts of programs can be compared as text only.
        let coded = coder.code(node, if node.merged > 1 { ALL_ROWS } else { class });
        let key = format!("{node:?} {:?}", Vec::from_iter(coded.iter().map(|launch| &launch.grid)));
        Ok::<_, LoadError>(match known.entry(key) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(place) => {
                let launches = coded.into_iter().map(|launch| {
                    let launch = Coded { merged: node.merged, ..launch };
                    binder.launch(launch, coder).map(Arc::new)
                });
                place.insert(launches.collect::<Result<_, _>>()?).clone()
            }
        })
    };
    let (mut body, mut one_row_head) = (Vec::new(), Vec::new());
    for List { class, body: nodes, head: _, direct } in &lists {
        let mut own = Vec::new();
        for node in nodes {
            own.extend(launches(node, *class, &mut coder, &mut binder)?);
        }
        body.push((*class, own));
        if let Some(direct) = direct {
            one_row_head = launches(direct, *class, &mut coder, &mut binder)?;
        }
    }
    let mut head = Vec::new();
    for node in &lists[0].head {
        head.extend(launches(node, ALL_ROWS, &mut coder, &mut binder)?);
    }
    for (name, part) in &coder.shown {
        device.show(name, &part.files, &part.constants);
    }
    let head = binder.head((head, one_row_head), &mut coder)?;
    binder.model(body, head, &mut coder)
}

impl<'a> Binder<'a> {
    fn new(
        device: &'a Device,
        facts: &'a Facts<'a>,
        weights: &'a Weights,
        sizes: &Sizes,
        mut bound: Bound,
    ) -> Result<Self, LoadError> {
        let Facts { program, kv, limits, .. } = facts;
        let Limits { block_size, kv_dtype, .. } = **limits;
        let page_words = page_words(kv, block_size, kv_dtype);
        let half = |what: &str| device.buffer(limits.pages * page_words, what);
        for _ in bound.pages.len()..pages::buffers(kv, block_size, kv_dtype) {
            bound.pages.push([half("pages of K")?, half("pages of V")?]);
        }
        for shape in program.state.layers.iter().skip(bound.states.len()) {
            bound.states.push(LayerState::new(device, shape, limits.states)?);
        }
        let old = bound.buffers.keys().copied().collect();
        for (&slot, &words) in &sizes.words {
            if bound.buffers.get(&slot).is_none_or(|buffer| buffer.size() < 4 * words as u64) {
                bound.buffers.insert(slot, device.buffer(words, slot.what())?);
            }
        }
        Ok(Self { device, facts, weights, bound, old, timed_with: None })
    }

    /// Returns a launch with its pipelines and buffers.
    fn launch(&mut self, coded: Coded, coder: &mut Coder<'_>) -> Result<Launch, LoadError> {
        let Coded { kernels, grid, kv_group, merged } = coded;
        for joined in &coder.matrices[self.bound.matrices.len()..] {
            let sources: Vec<_> = joined.matrices.iter().map(|&id| self.weights.matrix(id)).collect();
            self.bound.matrices.push(DeviceMatrix::upload(
                self.device,
                &sources,
                joined.order,
                joined.slots,
            )?);
        }
        let kernels =
            kernels.into_iter().map(|code| self.kernel(&code, coder)).collect::<Result<Vec<_>, _>>()?;
        // A launch that waits for another one is timed together with it.
        let counter = kernels[0].counter;
        let waits = self.device.target.timed && kernels[0].pipeline.hides();
        let timed_with = self.timed_with.filter(|_| waits);
        if waits {
            self.timed_with = timed_with.or(Some(counter));
        }
        if let Grid::Merge(_) = grid {
            self.timed_with = None;
        }
        let runs_once = matches!(grid, Grid::Copies { .. }) || kernels[0].pipeline.name == PLACE_EXPERTS;
        Ok(Launch { kernels, grid, kv_group, merged: merged as u32, timed_with, runs_once })
    }

    fn kernel(&mut self, code: &Code, coder: &Coder<'_>) -> Result<Kernel, LoadError> {
        let Code { name, counter, part: Part { files, constants, slots, seconds }, hazards } = code;
        let pipeline = self.device.pipeline(name, files, constants, hazards);
        let names: Vec<_> = pipeline.names().map(str::to_owned).collect();
        let find =
            |slots: &Slots, name: &str| slots.iter().find(|(known, _)| *known == name).map(|(_, s)| *s);
        let mut buffers = Vec::new();
        for name in &names {
            let buffer = match (find(seconds, name), find(slots, name)) {
                (Some(slot), _) => self.second(slot, coder)?,
                (None, Some(slot)) => self.buffer(slot, coder)?,
                (None, None) => panic!("kernel {} has no slot for {name}", pipeline.name),
            };
            buffers.push((name.as_str(), buffer));
        }
        let buffers: Vec<_> = buffers.iter().map(|(name, buffer)| (*name, buffer)).collect();
        let mut kernel = Kernel::new(self.device, pipeline, constants, &buffers, hazards);
        // The reader of what this kernel writes under a second name may have the first use of the first name in a pass, and its barrier
        // would be before this kernel.
        for (_, slot) in
            seconds.iter().filter(|(name, _)| *name != "gave_up" && names.iter().any(|own| own == name))
        {
            kernel.ends.push(self.buffer(*slot, coder)?);
        }
        let counter = counter.as_ref().unwrap_or(name);
        let counters = &mut self.bound.counters;
        let known = counters.iter().position(|known| known == counter);
        kernel.counter = known.unwrap_or_else(|| {
            counters.push(counter.clone());
            counters.len() - 1
        });
        Ok(kernel)
    }

    /// Returns the buffer of a slot.
    fn buffer(&mut self, slot: Slot, coder: &Coder<'_>) -> Result<wgpu::Buffer, LoadError> {
        if let Some(buffer) = self.bound.buffers.get(&slot) {
            return Ok(buffer.clone());
        }
        let device = self.device;
        let buffer = match slot {
            Slot::Pages { kv, is_k } => {
                let Limits { block_size, kv_dtype, .. } = *self.facts.limits;
                let place = pages::place(self.facts.kv, kv, block_size, kv_dtype).0;
                self.bound.pages[place][usize::from(!is_k)].clone()
            }
            Slot::State(layer, part) => self.bound.states[layer].part(part).clone(),
            Slot::Vector(id) => device.upload(self.weights.vector(id), "a vector")?,
            Slot::Bounds(bits) => {
                let finite = |bits| f32::from_bits(bits).clamp(f32::MIN, f32::MAX);
                device.upload(&bits.map(finite), "bounds")?
            }
            Slot::Bias(index) => device.upload(&coder.biases[index].values, "biases")?,
            Slot::Plane { matrix, part, plane } => {
                let plane = &self.bound.matrices[matrix].parts[part][plane];
                return Ok(plane.clone().expect("kernels read the planes of their layout"));
            }
            Slot::HostPlane { matrix, part, plane } => {
                let plane = &self.bound.matrices[matrix].host[part][plane];
                return Ok(plane.clone().expect("kernels read the planes of their layout"));
            }
            Slot::Pool(layer) => {
                let mut experts = self.facts.program.experts();
                let (_, experts) = experts.find(|(index, _)| *index == layer).expect("the layer has experts");
                device.upload(&places(experts.count, self.facts.slots(experts)), "places of experts")?
            }
            Slot::Rotations { rope, is_far } => {
                let rope = &self.facts.program.ropes[rope];
                device.upload(&rotations(rope, self.facts.limits.max_context, is_far), "rotations")?
            }
            Slot::Words(_) => device.buffer(coder.words().all, "handoff between launches")?,
            Slot::Between(_) => {
                let words = coder.words().queries + self.facts.program.hidden;
                device.buffer(words, "queries and the residual stream")?
            }
            slot => panic!("the nodes have no size of {slot:?}"),
        };
        self.bound.buffers.insert(slot, buffer.clone());
        Ok(buffer)
    }

    /// Returns the second name of a slot's buffer. wgpu clears a buffer before its first use, but does not see uses under second
    /// names, so a new one is cleared here.
    fn second(&mut self, slot: Slot, coder: &Coder<'_>) -> Result<wgpu::Buffer, LoadError> {
        let buffer = self.buffer(slot, coder)?;
        let second = self.bound.seconds.entry(slot).or_insert_with(|| {
            if !self.old.contains(&slot) {
                let mut encoder = self.device.encoder();
                encoder.clear_buffer(&buffer, 0, None);
                self.device.queue.submit([encoder.finish()]);
            }
            second_name(&self.device.inner, &buffer)
        });
        Ok(second.clone())
    }

    /// Returns the slots of layers.
    fn pools(&self) -> Vec<LayerPool> {
        let pool = |(layer, experts): (usize, &Experts)| {
            let slots = self.facts.slots(experts)?;
            let bytes = |linear: &Linear| {
                let matrix = self.weights.matrix(linear.matrix);
                let words = Layout::of(matrix.format).row_words(matrix.cols.div_ceil(BLOCK));
                4 * (matrix.rows * words.iter().sum::<usize>()) as u64
            };
            let bytes = experts.stacks().map(bytes).sum();
            let places = self.bound.buffers.get(&Slot::Pool(layer))?.clone();
            Some(LayerPool { layer, slots, bytes, places })
        };
        self.facts.program.experts().filter_map(pool).collect()
    }

    /// Adds sampling to the launches of a head, which begin with its norm. Returns nothing for those of no head.
    fn head(
        &mut self,
        (mut logits, one_row): (Vec<Arc<Launch>>, Vec<Arc<Launch>>),
        coder: &mut Coder<'_>,
    ) -> Result<Option<Head>, LoadError> {
        if logits.is_empty() {
            return Ok(None);
        }
        let norm = logits.remove(0);
        let facts = self.facts;
        let vocab = facts.program.vocab;
        let chunks = vocab.div_ceil(sampler::CHUNK) as u32;
        let constants = vec![("VOCAB", U(vocab as u32)), ("CHUNKS", U(chunks))];
        let merge = vec![("CHUNKS", U(chunks)), ("MERGE", U(1))];
        let (whole, low_bits) = sampler::whole(vocab);
        let draw =
            vec![("VOCAB", U(vocab as u32)), ("WHOLE", U(whole)), ("LOW_BITS", U(low_bits)), ("LOADS", U(8))];
        let slots = vec![
            ("samples", Slot::Samples),
            ("best", Slot::Best),
            ("logits", Slot::Logits),
            ("masks", Slot::Masks),
            ("tokens", Slot::Tokens),
            ("edits", Slot::Edits),
            ("step", Slot::Step),
            ("normed", Slot::Embeddings),
            ("means", Slot::Means),
        ];
        let mut launch = |name: &str, files: &[&'static str], constants, grid| {
            self.launch(Coded::new(name, Part::new(files, constants, slots.clone()), grid), coder)
        };
        let adjust = launch("adjust", wgsl!("args", "adjust"), vec![], Grid::Threads)?;
        let files = wgsl!("args", "argmax");
        let argmax = [
            launch("argmax", files, constants, Grid::Each(chunks))?,
            launch("argmax_merge", files, merge, Grid::Rows)?,
        ];
        let sample = launch("sample", wgsl!("args", "sample"), draw, Grid::Rows)?;
        let mean = facts.program.bidirectional.then(|| {
            let hidden = facts.program.hidden as u32;
            let grid = Grid::Each(hidden.div_ceil(32));
            launch("mean_rows", wgsl!("args", "mean_rows"), vec![("WIDTH", U(hidden))], grid)
        });
        let mean = mean.transpose()?;
        let mut io = |slot| self.buffer(slot, coder);
        let io = HeadIo {
            logits: io(Slot::Logits)?,
            normed: io(Slot::Embeddings)?,
            samples: io(Slot::Samples)?,
            masks: io(Slot::Masks)?,
            edits: io(Slot::Edits)?,
            means: mean.is_some().then(|| io(Slot::Means)).transpose()?,
        };
        Ok(Some(Head { norm, logits, one_row, mean, adjust, argmax, sample, io }))
    }

    /// Returns the model.
    fn model(
        mut self,
        body: Vec<(RowClass, Vec<Arc<Launch>>)>,
        head: Option<Head>,
        coder: &mut Coder<'_>,
    ) -> Result<Model, LoadError> {
        let pools = self.pools();
        if self.facts.target.handoff {
            // Kernels of adapters need it later, when it has tokens.
            self.second(Slot::Tokens, coder)?;
        }
        let handoff_partials = self.bound.buffers.get(&Slot::HandoffPartials).cloned();
        let residual = if self.facts.program.merged().is_some() { Slot::Merged } else { Slot::Stream };
        let mut io = |slot| self.buffer(slot, coder);
        let io = Io { step: io(Slot::Step)?, tokens: io(Slot::Tokens)?, residual: io(residual)? };
        let bound = &mut self.bound;
        (bound.joined, bound.biases) =
            (std::mem::take(&mut coder.matrices), std::mem::take(&mut coder.biases));
        let adapted =
            [false, true].map(|of_outputs| bound.buffers.get(&Slot::Adapted { of_outputs }).cloned());
        Ok(Model {
            body,
            head,
            states: bound.states.clone(),
            pages: bound.pages.clone(),
            pools,
            io,
            tilings: self.facts.tilings.clone(),
            table_rows: bound.buffers.get(&Slot::TableRows).cloned(),
            given: bound.buffers.get(&Slot::Given).cloned(),
            adapted,
            low_words: bound.buffers.get(&Slot::LowWords(0)).cloned(),
            counters: bound.counters.clone(),
            handoff_partials: handoff_partials
                .map(|partials| {
                    let is_new = !self.old.contains(&Slot::HandoffPartials);
                    HandoffPartials::new(self.device, partials, is_new)
                })
                .transpose()?,
            bound: self.bound,
        })
    }
}

/// Returns the first places of experts: those of the first slots, which the upload fills. See `place_experts.wgsl`.
fn places(count: usize, slots: Option<usize>) -> Vec<u32> {
    let own = 0..count as u32;
    [0; 4].into_iter().chain(own.clone()).chain(own).chain(vec![0; slots.unwrap_or(0)]).collect()
}

/// Cosines and sines of positions 256 i, or of positions below 256 with the rope's magnitude.
fn rotations(rope: &Rope, context: usize, is_far: bool) -> Vec<f32> {
    let (positions, step, magnitude) = match is_far {
        true => (context.div_ceil(256), 256, 1.0),
        false => (256, 1, f64::from(rope.magnitude)),
    };
    let position = |index: usize| (index * step) as f64;
    (0..positions)
        .flat_map(|index| {
            rope.frequencies.iter().map(move |&frequency| position(index) * f64::from(frequency))
        })
        .flat_map(|angle| [(magnitude * angle.cos()) as f32, (magnitude * angle.sin()) as f32])
        .collect()
}
