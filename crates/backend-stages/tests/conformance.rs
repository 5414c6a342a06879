//! The conformance suite on stages of the reference, whose bits are those of the reference as a whole.

use paguro_backend::{
    Backend, KvDtype, Program, WeightFormat, legal_cuts,
    reference::{KvRounding, Reference},
};
use paguro_backend_conformance::{Draw, Subject, Tolerance};
use paguro_backend_stages::Stages;

static REFERENCE: Reference = Reference { kv: KvRounding::F16, poison: Some(1) };

/// Returns up to `most` cuts at places that depend on the program.
fn cuts(program: &Program, most: usize) -> Vec<usize> {
    let mut legal = legal_cuts(program);
    let seed = usize::from(program.digest()[0]);
    while legal.len() > most {
        legal.remove(seed % legal.len());
    }
    legal
}

fn subject(stages: usize) -> Result<Subject, String> {
    Ok(Subject {
        backend: Box::new(move |_| {
            let cuts = Box::new(move |program: &Program| cuts(program, stages - 1));
            Box::new(Stages::new(vec![&REFERENCE as &dyn Backend; stages], cuts))
        }),
        has_threads: false,
        exact_rows: 1,
        tolerance: |_| Tolerance { error: 0.0, reason: "stages compute the bits of the whole" },
        kv_dtype: KvDtype::F16,
        kv: KvRounding::F16,
        unsupported: &[],
        refused: &[],
        kernel_formats: &WeightFormat::ALL,
        draw: Draw::from_env(),
    })
}

mod two {
    paguro_backend_conformance::conformance!(maybe super::subject(2); only
        format_q4_k many_sequences post_norms alternating_windows kv_geometry shared_kv layer_embeds experts latent_attention hybrids
        bidirectional given_rows rope_axes spans residuals towers adapters bad_adapters everything pages lengths embeddings
        batch_invariance exact_in_chunks exact_with_shared_prefix exact_after_copy_on_write exact_after_preemption exact_states exact_adapters
        exact_from_outside foreign_pages outputs samples carried_tokens bad_weights invalid_steps kernel_counts
        runners_are_separate);
}

mod three {
    paguro_backend_conformance::conformance!(maybe super::subject(3); only
        tied_head windows experts given_rows spans adapters everything hybrids mixer_sums exact_states batch_invariance exact_after_copy_on_write exact_from_outside
        outputs carried_tokens);
}
