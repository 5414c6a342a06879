use paguro_backend::{
    AdapterId, Attention, AttentionMode, Capacity, DeviceLayout, ExpertCount, FeedForward, KernelCount,
    KvDtype, LoadError, LowRank, Matrix, MatrixId, Mixer, OutputKind, PacedRunner, PageContent, PageFormat,
    PageId, PageMove, StepError, Ticket, WeightFormat, excerpt, reference::Reference, split,
};
use paguro_backend_conformance::ModelShape;
use paguro_backend_cpu::{Cpu, CpuOptions};

use super::*;

/// A device with a defect.
#[derive(Clone, Copy)]
enum Defect {
    /// Computes with other weights in one operation.
    Operation(&'static str),
    /// Returns the previous step's output for steps of this many rows.
    Stale(usize),
    /// Samples another token.
    Token,
    /// Lacks an operation.
    Lacks,
    None,
}

struct Broken(Defect);

struct BrokenRunner(Box<dyn Runner>, Defect, Vec<OutputValue>);

impl Backend for Broken {
    fn name(&self) -> &str {
        "broken"
    }

    fn capacity(&self) -> Capacity {
        Reference::default().capacity()
    }

    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        Reference::default().page_bytes(program, block_size, kv_dtype)
    }

    fn state_bytes(&self, program: &Program) -> usize {
        Reference::default().state_bytes(program)
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        Reference::default().device_layout(matrix)
    }

    fn weight_bytes(&self, program: &Program, weights: &Weights) -> u64 {
        Reference::default().weight_bytes(program, weights)
    }

    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64 {
        Reference::default().buffer_bytes(program, limits)
    }

    fn load(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        if let Defect::Lacks = self.0 {
            let (device, what) = ("broken".to_owned(), "gated delta rules".to_owned());
            return Err(LoadError::Unsupported { device, what, supported: "others can".to_owned() });
        }
        let mut program = program.clone();
        if let Defect::Operation(name) = self.0 {
            for layer in &mut program.layers {
                let Mixer::Attention(attention) = &mut layer.mixer else { panic!("{:?}", layer.mixer) };
                let FeedForward::Dense(dense) = &mut layer.ffn else { panic!("{:?}", layer.ffn) };
                match name {
                    "attention" => attention.scale *= 2.0,
                    "feed-forward" => dense.up = dense.gate.expect("a gate"),
                    "values" => *attention = Attention { v: attention.k, ..attention.clone() },
                    other => panic!("{other}"),
                }
            }
        }
        let runner = Reference::default().load(&program, weights, limits)?;
        Ok(Box::new(BrokenRunner(runner, self.0, Vec::new())))
    }

    fn runs_tower(&self, _: &Program) -> bool {
        false
    }

    fn load_tower(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<PacedRunner, LoadError> {
        Reference::default().load_tower(program, weights, limits)
    }
}

impl Runner for BrokenRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        let ticket = self.0.submit(step)?;
        if !matches!(self.1, Defect::Stale(rows) if rows == step.tokens.len()) {
            self.2.clear();
        }
        Ok(ticket)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        self.0.collect(ticket, out)?;
        match (self.1, &mut out.outcomes[..]) {
            (Defect::Token, [OutputValue::Sampled(sampled)]) => sampled.token = (sampled.token + 1) % 100,
            (_, [OutputValue::Logits(logits)]) => match self.2.first() {
                Some(OutputValue::Logits(stale)) => logits.clone_from(stale),
                _ => self.2 = out.outcomes.clone(),
            },
            _ => {}
        }
        Ok(())
    }

    fn load_head(
        &mut self,
        program: &Program,
        weights: Weights,
        shared: &[(MatrixId, MatrixId)],
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        self.0.load_head(program, weights, shared, limits)
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        self.0.move_pages(moves)
    }

    fn carries(&self, kind: &OutputKind<'_>) -> bool {
        self.0.carries(kind)
    }

    fn page_format(&self) -> Option<PageFormat> {
        self.0.page_format()
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        self.0.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], content: PageContent) -> Result<(), StepError> {
        self.0.write_pages(pages, bytes, content)
    }

    fn load_adapter(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError> {
        self.0.load_adapter(id, pairs)
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.0.unload_adapter(id);
    }

    fn expert_counts(&mut self) -> Result<Vec<ExpertCount>, StepError> {
        self.0.expert_counts()
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        self.0.kernel_counts()
    }
}

const LIMITS: Limits = Limits {
    block_size: 32,
    pages: 1000,
    max_rows: 64,
    max_sequences: 1,
    max_outputs: 1,
    max_context: 128,
    states: 0,
    kv_dtype: KvDtype::F16,
    attention: AttentionMode::Paged,
    expert_slots: None,
};

fn check_with(defect: Defect) -> Result<(), Problem> {
    let shape =
        ModelShape { windows: vec![None, Some(40), None], ..ModelShape::of_format(WeightFormat::Q8_0) };
    let model = shape.build(1);
    let (program, weights) = excerpt(&model.program, &model.weights);
    check(&Broken(defect), &Reference::default(), (&program, &weights), LIMITS)
}

#[test]
fn defects_are_found() {
    check_with(Defect::None).unwrap();
    for operation in ["attention", "feed-forward", "values"] {
        let problem = device(check_with(Defect::Operation(operation)));
        assert!(problem.contains("logits are off"), "{problem}");
    }
    // Each of these steps has other kernels.
    for rows in [24, 4, 1] {
        let problem = device(check_with(Defect::Stale(rows)));
        assert!(problem.contains(&format!("{rows} rows")), "{problem}");
    }
    assert!(device(check_with(Defect::Token)).contains("was sampled"));
    // A missing operation is not a wrong result.
    let lacking = check_with(Defect::Lacks);
    assert!(matches!(lacking, Err(Problem::Load(LoadError::Unsupported { .. }))), "{lacking:?}");
}

/// Stages of a model begin or end with rows.
#[test]
fn stages_are_checked() {
    let model = ModelShape::of_format(WeightFormat::Q8_0).build(1);
    for stage in split(&model.program, &model.weights, &[1]) {
        let (program, weights) = excerpt(&stage.program, &stage.weights);
        let check = |defect| check(&Broken(defect), &Reference::default(), (&program, &weights), LIMITS);
        check(Defect::None).unwrap();
        let problem = device(check(Defect::Operation("feed-forward")));
        assert!(problem.contains("are off"), "{problem}");
    }
}

/// Returns the message of a device's problem.
fn device(result: Result<(), Problem>) -> String {
    match result {
        Err(Problem::Device(problem)) => problem,
        other => panic!("{other:?}"),
    }
}

/// A model whose weights are all the largest half-precision number computes NaN, which is not a defect of the device.
#[test]
fn a_damaged_model_is_told_as_such() {
    let mut model = ModelShape::of_format(WeightFormat::F16).build(1);
    for matrix in &mut model.weights.matrices {
        let count = matrix.parts * matrix.rows * matrix.cols;
        matrix.bytes = half::f16::MAX.to_le_bytes().repeat(count).into();
    }
    let (program, weights) = excerpt(&model.program, &model.weights);
    // The model is reported even with a defective device.
    for defect in [Defect::None, Defect::Token] {
        let reference = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() });
        let found = check(&Broken(defect), &reference, (&program, &weights), LIMITS);
        assert!(matches!(found, Err(Problem::Model(number)) if !number.is_finite()), "{found:?}");
    }
}

#[test]
fn steps_fit_into_small_contexts() {
    assert_eq!(steps(512, 4096), STEPS);
    assert_eq!(steps(128, 4096), [128, 24, 4, 1, 1]);
    assert_eq!(steps(512, 64), [34, 24, 4, 1, 1]);
    assert_eq!(steps(8, 64), [8, 4, 1, 1]);
    assert_eq!(steps(512, 4), [4]);
}
