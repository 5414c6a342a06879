//! Places at which programs can be cut, and the reasons against others.

use paguro_backend::{
    Backend, Exit, Input, Program, legal_cuts, obstacle,
    reference::{KvRounding, Reference},
    split,
};
use paguro_backend_conformance::{DriveOptions, Driver, ModelShape};
use paguro_backend_stages::Stages;

static REFERENCE: Reference = Reference { kv: KvRounding::F16, poison: Some(1) };

/// A model of four layers.
fn four() -> ModelShape {
    ModelShape { windows: vec![None; 4], ..ModelShape::default() }
}

fn program(shape: &ModelShape) -> Program {
    shape.build(1).program
}

#[test]
fn cuts_pass_only_the_residual_stream() {
    assert_eq!(legal_cuts(&program(&four())), [1, 2, 3]);
    // The last two layers read K and V of the second one.
    let shared = program(&ModelShape { shared_kv: 2, ..four() });
    assert_eq!(legal_cuts(&shared), [1]);
    assert!(obstacle(&shared, 2).is_some_and(|reason| reason.contains("K and V of layers before it")));
    // States stay with their layers.
    assert_eq!(legal_cuts(&program(&ModelShape { mixers: "dada", ..four() })), [1, 2, 3]);
    let parts = program(&ModelShape { given_parts: 3, ..four() });
    assert_eq!(legal_cuts(&parts), [2, 3]);
    assert!(obstacle(&parts, 1).is_some_and(|reason| reason.contains("images")));
    for (shape, reason) in [
        (ModelShape { layer_embeds: Some(32), ..four() }, "embeddings for layers"),
        (ModelShape { bidirectional: true, ..four() }, "encoder"),
    ] {
        let program = program(&shape);
        assert_eq!(legal_cuts(&program), [0; 0], "{reason}");
        assert!(obstacle(&program, 2).is_some_and(|found| found.contains(reason)), "{reason}");
    }
}

#[test]
fn stages_have_their_own_weights_and_pages() {
    let model = ModelShape { tied: true, windows: vec![Some(9), None, Some(9), None], ..four() }.build(1);
    let stages = split(&model.program, &model.weights, &[1, 3]);
    let layers: Vec<_> = stages.iter().map(|stage| stage.layers.clone()).collect();
    assert_eq!(layers, [0..1, 1..3, 3..4]);
    let kinds = |stage: &Program| {
        (matches!(stage.input, Input::Tokens(_)), matches!(stage.exit, Exit::Logits(_)), stage.vocab > 0)
    };
    let found: Vec<_> = stages.iter().map(|stage| kinds(&stage.program)).collect();
    assert_eq!(found, [(true, false, true), (false, false, false), (false, true, true)]);
    for stage in &stages {
        stage.program.check(&stage.weights).unwrap();
        let slots: Vec<_> = stage.program.kv.groups.iter().map(|group| group.layer_slots).collect();
        assert_eq!(slots, [1, 1]);
    }
    // The matrix that embedding and head have in common is in two stages.
    let count: usize = stages.iter().map(|stage| stage.weights.matrices.len()).sum();
    assert_eq!(count, model.weights.matrices.len() + 1);
}

/// Programs of other lengths than the placed one, such as those of models that draft, run on the last device.
#[test]
fn other_programs_are_not_cut() {
    let cuts = |program: &Program| if program.layers.len() == 4 { vec![2] } else { Vec::new() };
    let stages = Stages::new(vec![&REFERENCE as &dyn Backend; 2], Box::new(cuts));
    let model = ModelShape { windows: vec![None; 2], ..four() }.build(2);
    let logits = |backend: &dyn Backend| {
        let mut driver = Driver::new(backend, &model, &DriveOptions::default()).unwrap();
        let id = driver.start(&[1, 2, 3]);
        driver.run(id, 2).unwrap();
        let format = driver.runner().page_format().map(|format| format.name);
        (driver.logits(id).1.to_vec(), format)
    };
    assert_eq!(logits(&stages).0, logits(&REFERENCE).0);
    // The formats of pages name the layers of each stage.
    let placed = four().build(2);
    let mut driver = Driver::new(&stages, &placed, &DriveOptions::default()).unwrap();
    let format = driver.runner().page_format().unwrap().name;
    assert!(format.contains("0..2") && format.contains("2..4"), "{format}");
    assert_eq!(logits(&stages).1, logits(&REFERENCE).1);
}
