//! Adapters: several in one step, sums of them, and none beside them.

use paguro_backend::{
    Adaptable, AdapterId, Backend, LoadError, LowRank, Matrix, MatrixId, Program, WeightFormat, Weights,
    reference::Reference,
};

use super::{
    Biases, DriveOptions, Driver, ExpertsShape, ModelShape, RandomModel, Rng, Subject, Verdict,
    compare::{Logits, Schedule, near, same},
    contract::require,
    exactness::{busy, drawn},
    random_matrix,
    rows::unless_refused,
};

/// Ranks of pairs: fewer than a vector has lanes, as many, and more.
const RANKS: [usize; 6] = [1, 4, 16, 17, 40, 64];
const FORMATS: [WeightFormat; 3] = [WeightFormat::F32, WeightFormat::F16, WeightFormat::BF16];

/// Returns a random adapter of most matrices of a model; the same one for the same seed.
pub fn random_adapter(program: &Program, weights: &Weights, seed: u64) -> Vec<LowRank> {
    let (mut rng, adaptable) = (Rng::new(seed), Adaptable::of(program, weights));
    let experts = program.layers.iter().find_map(|layer| match &layer.ffn {
        paguro_backend::FeedForward::Experts(experts) => Some(experts.count),
        _ => None,
    });
    let mut pairs = Vec::new();
    for id in 0..weights.matrices.len() as u32 {
        let id = MatrixId(id);
        let Some([out, inputs]) = adaptable.shape(id) else { continue };
        // The elements that routers read must not change, or rounding would choose other experts.
        if experts.is_some_and(|count| out == count || out == program.hidden) || rng.below(5) == 0 {
            continue;
        }
        let rank = RANKS[rng.below(RANKS.len())];
        let mut side = |side: &str, rows: usize, cols: usize, rms: f32| {
            let format = FORMATS[rng.below(FORMATS.len())];
            random_matrix(&format!("{}.{side}", id.0), format, rows, cols, rms, &mut rng)
        };
        let a = side("a", rank, inputs, 1.0 / (inputs as f32).sqrt());
        let b = side("b", out, rank, 1.0 / (rank as f32).sqrt());
        pairs.push(LowRank { matrix: id, a, b, scale: 0.4 });
    }
    pairs
}

/// Adapters of each sequence of a mixed schedule, as indices into a list of adapters, with their scales.
const USES: [&[(usize, f32)]; 4] = [&[], &[(0, 1.0)], &[(1, 0.5), (0, -0.75), (1, 0.0)], &[(1, 1.0)]];

/// Runs a schedule whose sequences use adapters by [`USES`], the first of them of index `first`.
fn run(driver: &mut Driver, schedule: &Schedule, first: usize, ids: &[AdapterId]) -> Result<Logits, String> {
    let sequences: Vec<_> = (first..)
        .zip(&schedule.sequences)
        .map(|(index, tokens)| {
            let uses = USES[index % USES.len()].iter().map(|&(adapter, scale)| (ids[adapter], scale));
            driver.start_adapted(tokens, uses.collect())
        })
        .collect();
    for parts in &schedule.steps {
        let parts: Vec<_> = parts.iter().map(|&(index, count)| (sequences[index], count)).collect();
        driver.step(&parts)?;
    }
    let logits = sequences.iter().map(|&id| driver.logits(id).1.to_vec()).collect();
    sequences.iter().for_each(|&id| driver.preempt(id));
    Ok(logits)
}

/// Loads a model with two adapters.
fn adapted(
    backend: &dyn Backend,
    model: &RandomModel,
    options: &DriveOptions,
) -> Result<(Driver, [AdapterId; 2]), String> {
    let mut driver = Driver::new(backend, model, options)?;
    let ids = [AdapterId(3), AdapterId(0)];
    for (id, seed) in ids.into_iter().zip(1..) {
        load(&mut driver, id, &random_adapter(&model.program, &model.weights, seed))?;
    }
    Ok((driver, ids))
}

/// Loads an adapter, a few pairs at a time. Every second one is prepared as by the engine, and others by their first step.
fn load(driver: &mut Driver, id: AdapterId, pairs: &[LowRank]) -> Verdict {
    let runner = driver.runner();
    let failed = |error: LoadError| error.to_string();
    pairs.chunks(3).try_for_each(|pairs| runner.load_adapter(id, pairs)).map_err(failed)?;
    runner.prepare_adapters().filter(|_| id.0 % 2 == 1).map_or(Ok(()), |work| work().map_err(failed))
}

/// Runs each sequence alone and in one piece.
fn alone(
    backend: &dyn Backend,
    model: &RandomModel,
    options: &DriveOptions,
    schedule: &Schedule,
) -> Result<Logits, String> {
    let (mut driver, ids) = adapted(backend, model, options)?;
    let one = |(index, tokens): (usize, &Vec<u32>)| {
        Ok(run(&mut driver, &Schedule::whole(vec![tokens.clone()]), index, &ids)?.remove(0))
    };
    schedule.sequences.iter().enumerate().map(one).collect()
}

/// Shapes with all kinds of matrices that adapters can change.
fn shapes() -> [ModelShape; 7] {
    let stateful = |mixers| ModelShape { mixers, rank: Some(64), ..ModelShape::default() };
    let shared =
        ExpertsShape { shared: Some(64), output_gate: true, latent: Some(64), ..ExpertsShape::default() };
    [
        ModelShape { biases: Biases::All, post_norms: true, tied: true, ..ModelShape::default() },
        ModelShape { attention_gate: true, keys_as_values: true, gated: false, ..ModelShape::default() },
        ModelShape { layer_embeds: Some(32), shared_kv: 1, ..ModelShape::default() },
        ModelShape { experts: Some(shared), ..ModelShape::default() },
        stateful("ld"),
        stateful("cs"),
        stateful("ha"),
    ]
}

/// Adapters agree with the reference.
pub(super) fn adapters(subject: &Subject) -> Verdict {
    unless_refused(subject, || {
        for shape in subject.draw.some("shapes with adapters", &shapes(), 1) {
            let formats =
                drawn(subject, "formats with adapters", &[WeightFormat::F16, WeightFormat::Q8_0], 1);
            for format in formats {
                let shape = ModelShape { format, hidden: 96, ffn: 160, ..shape.clone() };
                let model = shape.build(1);
                // Some outputs only, once more with the kernels of many rows.
                for (sparse, least_rows) in [(false, 0), (true, subject.exact_rows)] {
                    let options = DriveOptions { sparse, least_rows, ..subject.options() };
                    let schedule = Schedule::mixed(options.block_size, shape.vocab);
                    let (mut driver, ids) = adapted(&*(subject.backend)(2), &model, &options)?;
                    let ours = run(&mut driver, &schedule, 0, &ids)?;
                    let reference = Reference { kv: subject.kv, poison: Some(3) };
                    let whole = DriveOptions { scatter: None, sparse: false, least_rows: 0, ..options };
                    let mut theirs = alone(&reference, &model, &whole, &schedule)?;
                    for (ours, theirs) in ours.iter().flatten().zip(theirs.iter_mut().flatten()) {
                        if ours.is_empty() {
                            theirs.clear();
                        }
                    }
                    near(subject, format, &filled(ours), &filled(theirs))
                        .map_err(|error| format!("{error}\n{shape:?}"))?;
                }
            }
        }
        Ok(())
    })
}

/// Returns the rows that have logits.
fn filled(mut logits: Logits) -> Logits {
    logits.iter_mut().for_each(|rows| rows.retain(|row| !row.is_empty()));
    logits
}

/// Bits of a row depend neither on the other rows nor on their adapters.
pub(super) fn exact(subject: &Subject) -> Verdict {
    unless_refused(subject, || {
        for format in
            drawn(subject, "exact adapters", &[WeightFormat::F16, WeightFormat::Q8_0, WeightFormat::Q4_K], 1)
        {
            let shape = busy(format);
            let model = shape.build(2);
            let options = subject.exact_options();
            let schedule = Schedule::mixed(16, shape.vocab);
            let expected = alone(&*(subject.backend)(2), &model, &options, &schedule)?;
            let plain = Schedule::whole(schedule.sequences[..1].to_vec());
            let never = plain.load_and_run(&*(subject.backend)(2), &model, &options)?;
            same("an adapter of another sequence", &expected[..1].to_vec(), &never)?;
            for &threads in if subject.has_threads { &[1, 3][..] } else { &[2] } {
                let (mut driver, ids) = adapted(&*(subject.backend)(threads), &model, &options)?;
                let together = run(&mut driver, &schedule, 0, &ids)?;
                same(&format!("other adapters ({format})"), &together, &expected)?;
                // The same adapters under other numbers, after others.
                ids.iter().for_each(|&id| driver.runner().unload_adapter(id));
                let others = [AdapterId(3), AdapterId(7)];
                load(&mut driver, AdapterId(5), &random_adapter(&model.program, &model.weights, 9))?;
                for (id, seed) in others.into_iter().zip(1..) {
                    load(&mut driver, id, &random_adapter(&model.program, &model.weights, seed))?;
                }
                let again = run(&mut driver, &schedule, 0, &others)?;
                same(&format!("a load of adapters ({format})"), &again, &expected)?;
                for chunk in subject.draw.some("chunks with adapters", &[1, 5, 17, 48], 2) {
                    let uses = USES[1].iter().map(|&(adapter, scale)| (others[adapter], scale)).collect();
                    let id = driver.start_adapted(&schedule.sequences[1], uses);
                    driver.run(id, chunk)?;
                    let chunked: Logits = vec![driver.logits(id).1.to_vec()];
                    driver.preempt(id);
                    same(&format!("chunks of {chunk} ({format})"), &chunked, &expected[1..2].to_vec())?;
                }
            }
        }
        Ok(())
    })
}

/// Pairs that do not fit are refused with their names, and so are steps with adapters that do not exist.
pub(super) fn refusals(subject: &Subject) -> Verdict {
    unless_refused(subject, || {
        let experts = Some(ExpertsShape::default());
        let model = ModelShape { experts, ..ModelShape::default() }.build(4);
        let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.options())?;
        let pairs = random_adapter(&model.program, &model.weights, 4);
        let pair = pairs.first().ok_or("no matrix can be changed")?;
        let wrong = |change: fn(&mut LowRank)| {
            let mut pair = pair.clone();
            change(&mut pair);
            pair
        };
        let stack = model.weights.matrices.iter().position(|matrix| matrix.parts > 1).ok_or("no experts")?;
        let of_experts = LowRank { matrix: MatrixId(stack as u32), ..pair.clone() };
        let narrow = |side: &mut Matrix| {
            let bytes = side.rows * side.format.row_bytes(side.cols - 1);
            (side.cols, side.bytes) = (side.cols - 1, side.bytes.slice(0..bytes));
        };
        let narrow_a = LowRank { a: changed(&pair.a, narrow), ..pair.clone() };
        let cases = [
            ("experts", of_experts),
            ("another number of inputs", narrow_a),
            ("another number of outputs", wrong(|pair| pair.b.rows -= 1)),
            ("another rank", wrong(|pair| pair.a.rows += 1)),
            ("no rank", wrong(|pair| (pair.a.rows, pair.b.cols) = (0, 0))),
            ("too few bytes", wrong(|pair| pair.b.bytes = pair.b.bytes.slice(0..2))),
            ("an infinite scale", wrong(|pair| pair.scale = f32::INFINITY)),
            ("a matrix that does not exist", wrong(|pair| pair.matrix = MatrixId(u32::MAX))),
        ];
        for (what, pair) in cases {
            let runner = driver.runner();
            let refused = match runner.load_adapter(AdapterId(1), std::slice::from_ref(&pair)) {
                Err(LoadError::BadWeights { tensor, .. }) => tensor == pair.a.name || tensor == pair.b.name,
                Err(error @ LoadError::Unsupported { .. }) => return Err(error.to_string()),
                _ => false,
            };
            require(refused, || format!("a pair with {what} is not refused by its name"))?;
            runner.unload_adapter(AdapterId(1));
        }
        let tokens = Rng::new(4).tokens(4, model.program.vocab);
        let step = |driver: &mut Driver, id: u32| {
            let sequence = driver.start_adapted(&tokens, vec![(AdapterId(id), 1.0)]);
            let result = driver.step(&[(sequence, 4)]);
            driver.preempt(sequence);
            result
        };
        load(&mut driver, AdapterId(2), &pairs)?;
        step(&mut driver, 2)?;
        require(step(&mut driver, 1).is_err(), || {
            "a step with an adapter that does not exist passes".into()
        })?;
        driver.runner().unload_adapter(AdapterId(2));
        require(step(&mut driver, 2).is_err(), || "a step with an unloaded adapter passes".into())
    })
}

fn changed(matrix: &Matrix, change: impl Fn(&mut Matrix)) -> Matrix {
    let mut matrix = matrix.clone();
    change(&mut matrix);
    matrix
}
