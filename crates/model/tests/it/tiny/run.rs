//! Running a lowered model on the reference backend.

use paguro_backend::{
    AdapterId, AdapterUse, AttentionMode, Backend, KvDtype, Limits, LowRank, Output, OutputKind, OutputValue,
    PageId, StateId, Step, StepOutput, StepSequence, reference::Reference,
};
use paguro_model::Model;

/// The logits after each of `tokens`, `[tokens][vocab]`, from one step over one sequence.
pub fn logits(model: &Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    logits_with(model, tokens, &[])
}

/// The logits with an adapter.
pub fn logits_with(model: &Model, tokens: &[u32], pairs: &[LowRank]) -> Vec<Vec<f32>> {
    const BLOCK: usize = 16;
    let program = &model.program;
    let blocks = tokens.len().div_ceil(BLOCK);
    let groups = program.kv.groups.len();
    let limits = Limits {
        block_size: BLOCK,
        pages: 1 + blocks * groups,
        max_rows: tokens.len(),
        max_sequences: 1,
        max_outputs: tokens.len(),
        max_context: tokens.len(),
        states: 1,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    let mut runner = Reference::default().load(program, model.weights.clone(), limits).unwrap();
    let adapter = AdapterId(1);
    runner.load_adapter(adapter, pairs).unwrap();
    let adapters = [AdapterUse { sequence: 0, adapter, scale: 1.0 }];
    let pages: Vec<PageId> = (1..=blocks * groups).map(|page| PageId(page as u32)).collect();
    let state = program.state.in_place(StateId(0));
    let sequences = [StepSequence { rows: 0..tokens.len(), start: 0, tables: 0..pages.len(), state }];
    let outputs: Vec<_> = (0..tokens.len()).map(|row| Output { row, kind: OutputKind::Logits }).collect();
    let step = Step {
        tokens,
        adapters: &adapters,
        sequences: &sequences,
        pages: &pages,
        outputs: &outputs,
        ..Step::default()
    };
    let ticket = runner.submit(&step).unwrap();
    let mut out = StepOutput::default();
    runner.collect(ticket, &mut out).unwrap();
    let logits = out.outcomes.into_iter().map(|outcome| match outcome {
        OutputValue::Logits(logits) => logits,
        other => panic!("asked for logits, got {other:?}"),
    });
    logits.collect()
}
