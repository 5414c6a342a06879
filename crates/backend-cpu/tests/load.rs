//! Refusals of this backend at load with their messages, its description of the machine, and the sums of squares that it collects.

use std::sync::Arc;

use paguro_backend::{
    AttentionMode, Backend, FeedForward, InputSquares, KvDtype, Limits, LoadError, Mixer, WeightFormat,
};
use paguro_backend_conformance::{
    DriveOptions, Driver, ExpertsShape, ModelShape, RandomModel, Rng, random_matrix,
};
use paguro_backend_cpu::{Cpu, CpuOptions, Isa};

const LIMITS: Limits = Limits {
    block_size: 32,
    pages: 4,
    max_rows: 8,
    max_sequences: 2,
    max_outputs: 2,
    max_context: 64,
    states: 0,
    kv_dtype: KvDtype::F16,
    attention: AttentionMode::Paged,
    expert_slots: None,
};

/// Returns the error's message.
fn refusal(model: RandomModel, limits: Limits) -> String {
    let cpu = Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
    match cpu.load(&model.program, model.weights, limits) {
        Err(error @ LoadError::Unsupported { .. }) => error.to_string(),
        Err(error) => panic!("another kind of error: {error}"),
        Ok(_) => panic!("it was loaded"),
    }
}

#[test]
fn sizes_that_are_no_whole_vectors_are_refused() {
    let model = |head_dim| ModelShape { head_dim, ..ModelShape::default() }.build(1);
    assert!(refusal(model(63), LIMITS).contains("attention heads of 63 elements (head_dim)"));
    for block_size in [0, 8, 24, 48, 1024] {
        let message = refusal(model(64), Limits { block_size, ..LIMITS });
        assert!(message.contains(&format!("pages of {block_size} tokens")), "{message}");
    }
}

#[test]
fn heads_that_differ_between_layers_are_refused() {
    let mut model = ModelShape::default().build(1);
    let Mixer::Attention(op) = &mut model.program.layers[1].mixer else { panic!("no attention") };
    op.heads = 2;
    for (id, rows, cols) in [(op.q.matrix, 128, 64), (op.out.matrix, 64, 128)] {
        let matrix = random_matrix("fewer heads", WeightFormat::F32, rows, cols, 0.1, &mut Rng::new(1));
        model.weights.matrices[id.0 as usize] = matrix;
    }
    assert!(refusal(model, LIMITS).contains("query heads that differ between layers"));
}

#[test]
fn more_pages_than_memory_are_refused() {
    let model = ModelShape::default().build(1);
    for pages in [1 << 40, usize::MAX] {
        let limits = Limits { pages, ..LIMITS };
        match Cpu::new(CpuOptions::default()).load(&model.program, model.weights.clone(), limits) {
            Err(LoadError::OutOfMemory { what, .. }) => assert!(what.contains("K/V pages"), "{what}"),
            Err(error) => panic!("another kind of error: {error}"),
            Ok(_) => panic!("{pages} pages were allocated"),
        }
    }
}

#[test]
fn capacity_names_the_machine() {
    for isa in Isa::supported() {
        let cpu = Cpu::new(CpuOptions { threads: Some(3), isa: Some(isa), ..CpuOptions::default() });
        let capacity = cpu.capacity();
        assert!(capacity.description.ends_with(&format!(", 3 threads, {isa}")), "{}", capacity.description);
        assert!(capacity.features.contains(&isa.name().to_owned()));
        assert!(capacity.bytes_free > 0);
    }
    let one = Cpu::new(CpuOptions { threads: Some(0), ..CpuOptions::default() });
    assert_eq!(one.threads(), 1);
}

#[test]
fn squares_are_those_of_all_rows_and_change_no_logit() {
    let shape = ModelShape {
        format: WeightFormat::Q8_0,
        windows: vec![None; 4],
        mixers: "alda",
        rank: None,
        experts: Some(ExpertsShape::default()),
        ..ModelShape::default()
    };
    let model = shape.build(3);
    let tokens: Vec<u32> = (0..50).map(|i| i * 7 % 131).collect();
    let run = |squares: Option<Arc<InputSquares>>, threads, chunk| {
        let cpu = Cpu::new(CpuOptions { threads: Some(threads), squares, ..CpuOptions::default() });
        let mut driver = Driver::new(&cpu, &model, &DriveOptions::default()).unwrap();
        let sequence = driver.start(&tokens);
        driver.run(sequence, chunk).unwrap();
        driver.logits(sequence).1.to_vec()
    };
    let (one, other) = (Arc::new(InputSquares::default()), Arc::new(InputSquares::default()));
    let logits = run(None, 2, 50);
    assert_eq!(run(Some(one.clone()), 1, 50), logits);
    assert_eq!(run(Some(other.clone()), 3, 7), logits);
    let squares = one.get();
    assert_eq!(squares, other.get());

    // The first matrices read the norm of the embeddings.
    let program = &model.program;
    let Mixer::Attention(attention) = &program.layers[0].mixer else { panic!("no attention") };
    let norm = attention.norm.unwrap();
    let (weight, mut expected) = (model.weights.vector(norm.weight), vec![0.0; program.hidden]);
    for &token in &tokens {
        let mut row = vec![0.0; program.hidden];
        let table = model.weights.matrix(program.embed().expect("tokens").table);
        table.decode_row(token as usize, &mut Vec::new(), &mut row).unwrap();
        row.iter_mut().for_each(|x| *x *= program.embed().expect("tokens").scale);
        let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(norm.eps)).sqrt();
        for ((sum, &x), &weight) in expected.iter_mut().zip(&row).zip(weight) {
            *sum += (f64::from(x) * scale * f64::from(weight)).powi(2);
        }
    }
    for id in [attention.q.matrix, attention.k.unwrap().matrix] {
        let found = &squares[id.0 as usize];
        assert_eq!(found.rows, [50]);
        let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * b;
        assert!(found.sums.iter().zip(&expected).all(close), "{found:?}, not {expected:?}");
    }

    // The experts of a row read what its router reads.
    let FeedForward::Experts(experts) = &program.layers[1].ffn else { panic!("no experts") };
    let (router, up) =
        (&squares[experts.router.linear.matrix.0 as usize], &squares[experts.up.matrix.0 as usize]);
    assert_eq!((router.rows[0], up.rows.len(), up.rows.iter().sum::<u64>()), (50, 8, 2 * 50));
    for (input, &sum) in router.sums.iter().enumerate() {
        let of_experts: f64 = up.sums.iter().skip(input).step_by(up.cols).sum();
        assert!((of_experts - 2.0 * sum).abs() <= 1e-9 * sum, "{of_experts}, not twice {sum}");
    }
}
