//! Cases that compare logits with the backend's own, bit for bit: batch invariance.

use paguro_backend::{OutputKind, QkNormKind, RopeStyle, WeightFormat};

use super::{
    Biases, DriveOptions, Driver, ModelShape, RandomModel, Rng, Subject, Verdict,
    compare::{Logits, Schedule, same},
};

/// A model of this format with many features, windows above all.
pub(super) fn busy(format: WeightFormat) -> ModelShape {
    let shape = ModelShape::of_format(format);
    ModelShape {
        // Three query heads for each K/V head; four where the matrices' columns must be multiples of 256.
        heads: if format.block_len() > 32 { 8 } else { 6 },
        windows: vec![Some(21), None, Some(21)],
        rope_style: RopeStyle::Interleaved,
        rotated: Some(48),
        biases: Biases::Qkv,
        qk_norm: Some(QkNormKind::Head),
        post_norms: true,
        attention_cap: Some(20.0),
        logit_cap: Some(10.0),
        tied: true,
        ..shape
    }
}

/// Formats of each kind, for cases in which the format hardly matters.
const SOME: [WeightFormat; 3] = [WeightFormat::F16, WeightFormat::Q8_0, WeightFormat::Q4_K];

pub(super) fn supported(subject: &Subject, formats: &[WeightFormat]) -> Vec<WeightFormat> {
    formats.iter().copied().filter(|format| !subject.unsupported.contains(format)).collect()
}

/// Returns the formats that the subject supports, or `count` of them that it draws for this case.
pub(super) fn drawn(
    subject: &Subject,
    case: &str,
    formats: &[WeightFormat],
    count: usize,
) -> Vec<WeightFormat> {
    subject.draw.some(case, &supported(subject, formats), count)
}

/// Logits of sequences that each run alone and in one piece on a newly loaded model.
pub(super) fn alone(
    subject: &Subject,
    model: &RandomModel,
    sequences: &[Vec<u32>],
) -> Result<Logits, String> {
    let run = |tokens: &Vec<u32>| {
        let schedule = Schedule::whole(vec![tokens.clone()]);
        Ok(schedule.load_and_run(&*(subject.backend)(2), model, &subject.exact_options())?.remove(0))
    };
    sequences.iter().map(run).collect()
}

/// Results do not depend on other rows of the step.
pub(super) fn batches(subject: &Subject) -> Verdict {
    for format in drawn(subject, "batches", subject.kernel_formats, 1) {
        let shape = busy(format);
        let model = shape.build(2);
        let schedule = Schedule::mixed(16, shape.vocab);
        let together = schedule.load_and_run(&*(subject.backend)(2), &model, &subject.exact_options())?;
        let alone = alone(subject, &model, &schedule.sequences)?;
        same(&format!("in a batch ({format})"), &together, &alone)?;
    }
    // Each thread processes several chunks of these inputs, however they are divided.
    for format in drawn(subject, "many inputs", &SOME, 1) {
        let [few, many] = if format.block_len() > 32 { [256, 3328] } else { [64, 3296] };
        for (hidden, ffn) in subject.draw.some("sides of many inputs", &[(few, many), (many, few)], 1) {
            let shape = ModelShape { format, hidden, ffn, windows: vec![None], ..ModelShape::default() };
            let model = shape.build(2);
            let sequences = vec![Rng::new(2).tokens(5, shape.vocab)];
            let schedule = Schedule { sequences, steps: vec![vec![(0, 3)], vec![(0, 1)], vec![(0, 1)]] };
            let steps = schedule.load_and_run(&*(subject.backend)(2), &model, &subject.exact_options())?;
            let alone = alone(subject, &model, &schedule.sequences)?;
            same(&format!("many inputs ({format}, {hidden} and {ffn})"), &steps, &alone)?;
        }
    }
    Ok(())
}

/// Embeddings are as exact as logits: in any batch, in any chunks, with any number of threads.
pub(super) fn embeddings(subject: &Subject) -> Verdict {
    let options = DriveOptions { output: OutputKind::Embedding, ..subject.exact_options() };
    for format in drawn(subject, "embeddings", &SOME, 1) {
        let shape = busy(format);
        let model = shape.build(7);
        let schedule = Schedule::mixed(16, shape.vocab);
        let together = schedule.load_and_run(&*(subject.backend)(3), &model, &options)?;
        let alone = schedule.sequences.iter().map(|tokens| {
            let schedule = Schedule::whole(vec![tokens.clone()]);
            Ok(schedule.load_and_run(&*(subject.backend)(2), &model, &options)?.remove(0))
        });
        same(
            &format!("in a batch (embeddings, {format})"),
            &together,
            &alone.collect::<Result<_, String>>()?,
        )?;
    }
    Ok(())
}

/// Results do not depend on the chunks of the prompt.
pub(super) fn chunks(subject: &Subject) -> Verdict {
    for format in drawn(subject, "chunks", subject.kernel_formats, 1) {
        let shape = busy(format);
        let model = shape.build(3);
        let sequences = vec![Rng::new(3).tokens(53, shape.vocab)];
        let whole = alone(subject, &model, &sequences)?;
        let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.exact_options())?;
        let sizes: &[usize] = match SOME.contains(&format) {
            true => &[1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 48, 52],
            false => &[1, 3, 8, 17],
        };
        for chunk in subject.draw.some(&format!("sizes of chunks {format}"), sizes, 4) {
            let id = driver.start(&sequences[0]);
            driver.run(id, chunk)?;
            let chunked = vec![driver.logits(id).1.to_vec()];
            driver.preempt(id);
            same(&format!("chunks of {chunk} ({format})"), &chunked, &whole)?;
        }
    }
    Ok(())
}

/// Results do not depend on the chunks of a long prompt: splits of attention must have fixed borders.
pub(super) fn long_chunks(subject: &Subject) -> Verdict {
    let shape = ModelShape { windows: vec![None, Some(300)], hidden: 32, ffn: 32, ..ModelShape::default() };
    let (model, tokens) = (shape.build(4), 1100);
    let sequences = vec![Rng::new(4).tokens(tokens, shape.vocab)];
    let options = DriveOptions { pages: 160, max_context: tokens, ..subject.exact_options() };
    let run = |threads: usize, steps: &[usize]| {
        let steps = steps.iter().map(|&count| vec![(0, count)]).collect();
        Schedule { sequences: sequences.clone(), steps }.load_and_run(
            &*(subject.backend)(threads),
            &model,
            &options,
        )
    };
    let whole = run(2, &[tokens])?;
    let ways: [(usize, &[usize]); 2] = [(2, &[300, 1, 511, 1, 1, 286]), (3, &[1, 1023, 1, 64, 1, 10])];
    for (threads, steps) in subject.draw.some("long chunks", &ways, 1) {
        same(&format!("chunking and {threads} threads"), &run(threads, steps)?, &whole)?;
    }
    Ok(())
}

/// Results do not depend on the number of rows in a step, also beyond a thousand.
pub(super) fn wide_steps(subject: &Subject) -> Verdict {
    for format in drawn(subject, "wide steps", &[WeightFormat::F16, WeightFormat::Q8_0], 1) {
        let shape = ModelShape { windows: vec![Some(16)], ..ModelShape::of_format(format) };
        let model = shape.build(8);
        let (long, short) = (1040, 40);
        let mut rng = Rng::new(10);
        let sequences: Vec<_> = [long, short].map(|tokens| rng.tokens(tokens, shape.vocab)).to_vec();
        let options = DriveOptions { max_context: long + short, ..subject.exact_options() };
        let run = |steps: Vec<Vec<(usize, usize)>>| {
            let schedule = Schedule { sequences: sequences.clone(), steps };
            schedule.load_and_run(&*(subject.backend)(2), &model, &options)
        };
        let wide = run(vec![vec![(0, long), (1, short)]])?;
        let narrow = run(vec![vec![(0, 500)], vec![(1, short), (0, long - 500)]])?;
        same(&format!("steps of many rows ({format})"), &wide, &narrow)?;
    }
    Ok(())
}

/// Results do not depend on whether this sequence or another one has computed the prefix.
pub(super) fn shared_prefix(subject: &Subject) -> Verdict {
    for format in drawn(subject, "shared prefix", &SOME, 1) {
        let shape = busy(format);
        let model = shape.build(5);
        let mut rng = Rng::new(5);
        let first = rng.tokens(37, shape.vocab);
        let mut second = first[..32].to_vec();
        second.extend(rng.tokens(9, shape.vocab));
        let expected = alone(subject, &model, &[first.clone(), second.clone()])?;

        let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.exact_options())?;
        let owner = driver.start(&first);
        driver.step(&[(owner, 36)])?;
        let heir = driver.fork(owner, 32, &second)?;
        // The owner continues while the other sequence reads its pages, in the same step; then it ends.
        driver.step(&[(heir, 4), (owner, 1)])?;
        let owned = driver.logits(owner).1.to_vec();
        driver.preempt(owner);
        driver.run(heir, 3)?;
        let inherited = driver.logits(heir).1.to_vec();
        let expected = vec![expected[0].clone(), expected[1][32..].to_vec()];
        same(&format!("a prefix in another's pages ({format})"), &vec![owned, inherited], &expected)?;
    }
    Ok(())
}

/// Results do not depend on a copy of the last page from another sequence.
pub(super) fn copy_on_write(subject: &Subject) -> Verdict {
    for format in drawn(subject, "copy on write", &SOME, 1) {
        let shape = busy(format);
        let model = shape.build(6);
        let mut rng = Rng::new(6);
        let stem = rng.tokens(21, shape.vocab);
        let branches: Vec<Vec<u32>> =
            (0..3).map(|_| [&stem[..], &rng.tokens(14, shape.vocab)].concat()).collect();
        let expected = alone(subject, &model, &branches)?;

        let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.exact_options())?;
        let trunk = driver.start(&branches[0]);
        driver.step(&[(trunk, 21)])?;
        let left = driver.fork(trunk, 21, &branches[1])?;
        driver.step(&[(trunk, 5), (left, 1)])?;
        // A fork from a page that its owner has written further meanwhile.
        let right = driver.fork(trunk, 21, &branches[2])?;
        for _ in 0..9 {
            driver.step(&[(right, 1), (trunk, 1), (left, 1)])?;
        }
        for (index, id) in [trunk, left, right].into_iter().enumerate() {
            driver.run(id, 2)?;
            let (from, logits) = driver.logits(id);
            let expected = vec![expected[index][from..].to_vec()];
            same(&format!("a copied page ({format}, branch {index})"), &vec![logits.to_vec()], &expected)?;
        }
    }
    Ok(())
}

/// Results do not depend on preemption and recomputation in other pages, chunks and batches.
pub(super) fn preemption(subject: &Subject) -> Verdict {
    for format in drawn(subject, "preemption", &SOME, 1) {
        let shape = busy(format);
        let model = shape.build(7);
        let mut rng = Rng::new(7);
        let victim_tokens = rng.tokens(44, shape.vocab);
        let expected = alone(subject, &model, std::slice::from_ref(&victim_tokens))?;

        let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.exact_options())?;
        let victim = driver.start(&victim_tokens[..33]);
        driver.run(victim, 20)?;
        for &token in &victim_tokens[33..38] {
            driver.push(victim, &[token]);
            driver.step(&[(victim, 1)])?;
        }
        driver.preempt(victim);
        let thief = driver.start(&rng.tokens(70, shape.vocab));
        driver.run(thief, 64)?;
        driver.push(thief, &rng.tokens(2, shape.vocab));
        driver.step(&[(thief, 1), (victim, 11)])?;
        driver.step(&[(victim, 27), (thief, 1)])?;
        driver.push(victim, &victim_tokens[38..]);
        driver.run(victim, 1)?;
        same(&format!("preemption ({format})"), &vec![driver.logits(victim).1.to_vec()], &expected)?;
    }
    Ok(())
}

/// For any number of threads, where there are any.
pub(super) fn threads(subject: &Subject) -> Verdict {
    if !subject.has_threads {
        println!("skipped: the backend has no threads");
        return Ok(());
    }
    for format in drawn(subject, "threads", subject.kernel_formats, 3) {
        let shape = busy(format);
        let model = shape.build(8);
        let schedule = Schedule::mixed(16, shape.vocab);
        let run =
            |threads| schedule.load_and_run(&*(subject.backend)(threads), &model, &subject.exact_options());
        let one = run(1)?;
        for threads in [2, 3, 5] {
            same(&format!("{threads} threads ({format})"), &run(threads)?, &one)?;
        }
    }
    Ok(())
}

/// Results do not depend on the place and the former content of pages, nor on repetition.
pub(super) fn places(subject: &Subject) -> Verdict {
    for format in drawn(subject, "places", &SOME, 1) {
        let shape = busy(format);
        let model = shape.build(9);
        let schedule = Schedule::mixed(16, shape.vocab);
        let backend = (subject.backend)(2);
        let in_order = DriveOptions { scatter: None, pages: 40, ..subject.exact_options() };
        let fresh = schedule.load_and_run(&*backend, &model, &in_order)?;
        for (scatter, stale) in [(Some(7), false), (None, true), (Some(8), true)] {
            let options = DriveOptions { scatter, stale, ..in_order };
            let mut driver = Driver::new(&*backend, &model, &options)?;
            for round in 0..3 {
                let what = match (scatter, stale) {
                    (Some(_), true) => "scattered pages that were written before",
                    (Some(_), false) => "scattered pages",
                    (None, _) => "pages that were written before",
                };
                same(&format!("{what}, round {round} ({format})"), &schedule.run(&mut driver)?, &fresh)?;
            }
        }
    }
    Ok(())
}
