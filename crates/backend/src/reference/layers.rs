//! The forward pass: embeddings, layers, feed-forward networks, the head.

use std::sync::Arc;

use super::{ReferenceRunner, ops};
use crate::{
    Activation, Dense, Embed, Exit, Experts, FeedForward, Head, Input, Joined, Layer, LayerEmbeds,
    LayerInput, MatrixId, Mixer, Norm, OutputKind, OutputValue, Residual, RowOp, SharedExpert, Step,
    StepError, StepSequence, mean_of_rows, sampling,
};

impl ReferenceRunner {
    /// Runs the program, and computes the outputs at its end.
    pub(super) fn forward(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        let program = Arc::clone(&self.program);
        let of_sequence = |(index, sequence): (usize, &StepSequence)| {
            sequence.rows.clone().map(move |_| step.adapters_of(index).to_vec())
        };
        self.adapted = step.sequences.iter().enumerate().flat_map(of_sequence).collect();
        // The residual stream, one vector for each row.
        let mut x: Vec<Vec<f32>> = Vec::with_capacity(step.tokens.len());
        for sequence in step.sequences {
            let rows = (sequence.start..).zip(sequence.rows.clone());
            x.extend(rows.map(|(position, row)| self.begin(step, row, position)));
        }
        self.count("embed");
        let embeds = self.layer_embeds(step, &x)?;
        let mut taps: Vec<Vec<Vec<f32>>> =
            vec![Vec::new(); program.merged().map_or(0, |merged| merged.taps.len())];
        self.taps(0, &x, &mut taps);
        for (index, layer) in program.layers.iter().enumerate() {
            self.layer(layer, step, &mut x);
            self.layer_end(layer, &embeds, &mut x);
            if index + 1 < program.given_parts {
                for (row, x) in x.iter_mut().enumerate() {
                    let part = self.given(step, row, index + 1).unwrap_or_default();
                    x.iter_mut().zip(part).for_each(|(x, part)| *x += part);
                }
            }
            self.taps(index + 1, &x, &mut taps);
        }
        for output in step.outputs {
            let answer = match &program.exit {
                Exit::Merged(merged) => {
                    let taps = taps.iter().flat_map(|rows| rows[output.row / merged.rows].iter().copied());
                    OutputValue::Residual(taps.collect())
                }
                _ if matches!(output.kind, OutputKind::Residual) => {
                    OutputValue::Residual(x[output.row].clone())
                }
                Exit::Logits(head) if matches!(output.kind, OutputKind::Mean) => {
                    let rows = &x[step.rows_of(output)];
                    let normed: Vec<_> = rows.iter().map(|x| self.norm(&head.norm, x)).collect();
                    let rows = normed.iter().map(Vec::as_slice);
                    OutputValue::Embedding(mean_of_rows(rows, program.hidden))
                }
                Exit::Logits(head) => self.head(head, output.row, &output.kind, &x[output.row]),
                Exit::Rows => unreachable!("a valid step asks for rows only"),
            };
            self.answers.push(answer);
        }
        self.count("head");
        Ok(())
    }

    /// Computes the taps after this number of layers.
    fn taps(&self, layers: usize, x: &[Vec<f32>], taps: &mut [Vec<Vec<f32>>]) {
        let merged = self.program.merged().map_or(&[][..], |merged| &merged.taps);
        for (tap, rows) in merged.iter().zip(taps).filter(|(tap, _)| tap.layers == layers) {
            *rows = self.row_ops(&tap.ops, x.to_vec(), &[]);
        }
    }

    /// Runs operations on rows. `added` is what [`RowOp::Add`] adds to a single row.
    fn row_ops(&self, ops: &[RowOp], mut rows: Vec<Vec<f32>>, mut added: &[f32]) -> Vec<Vec<f32>> {
        for op in ops {
            match op {
                RowOp::Norm(norm) => rows.iter_mut().for_each(|x| *x = self.norm(norm, x)),
                RowOp::Linear { linear, width: _, activation } => {
                    for x in &mut rows {
                        *x = self.plain(linear, x);
                        activation.iter().for_each(|&activation| *x = activated(None, x, activation));
                    }
                }
                RowOp::Add => {
                    let (now, later) = added.split_at(self.program.hidden);
                    rows.iter_mut().flatten().zip(now).for_each(|(x, y)| *x += y);
                    added = later;
                }
                RowOp::Join(joined) => rows = rows.chunks_exact(*joined).map(<[_]>::concat).collect(),
                RowOp::Mean { rows: count, scale } => {
                    let mean = |rows: &[Vec<f32>]| {
                        let sum = |at: usize| rows.iter().map(|x| f64::from(x[at])).sum::<f64>();
                        let of = |at| (sum(at) / *count as f64 * f64::from(*scale)) as f32;
                        (0..rows[0].len()).map(of).collect()
                    };
                    rows = rows.chunks_exact(*count).map(mean).collect();
                }
                RowOp::Affine { scale, bias } => {
                    let (scale, bias) = (self.vector(*scale), self.vector(*bias));
                    for x in &mut rows {
                        x.iter_mut()
                            .zip(scale.iter().zip(bias))
                            .for_each(|(x, (scale, bias))| *x = *x * scale + bias);
                    }
                }
                RowOp::Activate { activation, gated } => {
                    for x in &mut rows {
                        let (gate, up) = if *gated { x.split_at(x.len() / 2) } else { (&[][..], &x[..]) };
                        *x = activated(gated.then_some(gate), up, *activation);
                    }
                }
            }
        }
        rows
    }

    /// Returns the residual stream of a row before the first layer.
    fn begin(&self, step: &Step<'_>, row: usize, position: usize) -> Vec<f32> {
        match &self.program.input {
            Input::Patches(patches) => {
                let given = step.given_row(row, self.program.given_width()).unwrap_or_default();
                let (patch, added) = given.split_at(patches.width);
                self.row_ops(&patches.ops, vec![patch.to_vec()], added).remove(0)
            }
            input => match (self.given(step, row, 0), input) {
                (Some(given), Input::Tokens(Embed { joined: Some(joined), .. })) => {
                    let Joined { width: _, token_norm, given_norm, linear } = *joined;
                    let x = self.program.embed().map(|embed| self.embed(embed, step.tokens[row], position));
                    let x = self.optional_norm(token_norm, &x.unwrap_or_default());
                    self.plain(&linear, &[x, self.optional_norm(given_norm, given)].concat())
                }
                (Some(given), _) => given.to_vec(),
                (None, Input::Tokens(embed)) => self.embed(embed, step.tokens[row], position),
                (None, Input::Rows | Input::Patches(_)) => unreachable!("a valid step gives all rows"),
            },
        }
    }

    /// Returns a part of a given row, `[hidden]`, or the row that is joined with an embedding.
    fn given<'a>(&self, step: &Step<'a>, row: usize, part: usize) -> Option<&'a [f32]> {
        let width = self.program.part_width();
        let parts = step.given_row(row, self.program.given_parts * width)?;
        Some(&parts[part * width..][..width])
    }

    /// Embeddings for layers of all rows, `[count * width]` each; none without [`LayerEmbeds`].
    fn layer_embeds(&self, step: &Step<'_>, x: &[Vec<f32>]) -> Result<Vec<Vec<f32>>, StepError> {
        let Some(LayerEmbeds { table, scale, count, width, projection, norm }) = self.program.layer_embeds()
        else {
            return Ok(Vec::new());
        };
        let table = &self.tables[table.0 as usize];
        let of_row = |(row, (x, &token)): (usize, (&Vec<f32>, &u32))| {
            let mut own = vec![0.0; count * width];
            table.decode_row(token as usize, &mut Vec::new(), &mut own)?;
            let projected = self.linear(projection, row, x);
            for (own, projected) in own.chunks_exact_mut(*width).zip(projected.chunks_exact(*width)) {
                let normed = self.norm(norm, projected);
                own.iter_mut().zip(normed).for_each(|(own, normed)| *own = normed + scale * *own);
            }
            Ok(own)
        };
        let rows = x.iter().zip(step.tokens).enumerate().map(of_row).collect::<Result<_, StepError>>()?;
        table.check_source()?;
        Ok(rows)
    }

    /// Adds the layer's own embedding, if it has one, and scales the residual stream: the end of a layer, after both branches.
    fn layer_end(&mut self, layer: &Layer, embeds: &[Vec<f32>], x: &mut [Vec<f32>]) {
        if let Some(LayerInput { index, gate, activation, out, post_norm }) = &layer.input {
            for (row, (x, embed)) in x.iter_mut().zip(embeds).enumerate() {
                let gate = self.linear(gate, row, x);
                let embed = &embed[index * gate.len()..][..gate.len()];
                let gated: Vec<f32> = gate
                    .iter()
                    .zip(embed)
                    .map(|(&gate, &embed)| ops::activate(Some(gate), embed, *activation))
                    .collect();
                let added = self.optional_norm(*post_norm, &self.linear(out, row, &gated));
                x.iter_mut().zip(added).for_each(|(x, added)| *x += added);
            }
            self.count("layer_input");
        }
        if layer.output_scale != 1.0 {
            x.iter_mut().flatten().for_each(|x| *x *= layer.output_scale);
        }
    }

    /// Runs a layer on all rows.
    fn layer(&mut self, layer: &Layer, step: &Step<'_>, x: &mut [Vec<f32>]) {
        let mixed = self.mix(&layer.mixer, step, x);
        if layer.residual == Residual::Sequential {
            add(x, &mixed, layer.branch_scale);
        }
        self.norm_rows(layer.norm_after_mixer, x);
        let rows = x.iter().enumerate();
        let fed: Vec<Vec<f32>> = match &layer.ffn {
            FeedForward::None => Vec::new(),
            FeedForward::Dense(dense) => rows.map(|(row, x)| self.dense(dense, row, x)).collect(),
            FeedForward::Experts(experts) => rows.map(|(row, x)| self.experts(experts, row, x)).collect(),
        };
        match &layer.ffn {
            FeedForward::None => {}
            FeedForward::Dense(_) => self.count("dense"),
            FeedForward::Experts(_) => self.count("experts"),
        }
        if layer.residual == Residual::Parallel {
            add(x, &mixed, layer.branch_scale);
        }
        add(x, &fed, layer.branch_scale);
        self.norm_rows(layer.norm_after_ffn, x);
    }

    /// Norms rows in place, if there is a norm.
    fn norm_rows(&self, norm: Option<Norm>, x: &mut [Vec<f32>]) {
        if let Some(norm) = norm {
            x.iter_mut().for_each(|x| *x = self.norm(&norm, x));
        }
    }

    /// Returns the output of a mixer for each row.
    fn mix(&mut self, mixer: &Mixer, step: &Step<'_>, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        match mixer {
            Mixer::None => Vec::new(),
            Mixer::Attention(attention) => self.attention(attention, step, x),
            Mixer::Latent(latent) => self.latent(latent, step, x),
            Mixer::Conv(conv) => self.conv(conv, step, x),
            Mixer::DeltaRule(delta) => self.delta(delta, step, x),
            Mixer::Ssd(ssd) => self.ssd(ssd, step, x),
            Mixer::Sum(branches) => {
                let mut sum = vec![vec![0.0; self.program.hidden]; x.len()];
                for branch in branches {
                    add(&mut sum, &self.mix(&branch.mixer, step, x), branch.scale);
                }
                sum
            }
        }
    }

    /// Returns the embedding of a token.
    fn embed(&self, embed: &Embed, token: u32, position: usize) -> Vec<f32> {
        let width = self.program.part_width();
        let row = |table: MatrixId, row: usize| &self.matrices[table.0 as usize][row * width..][..width];
        let (kind, token) = (token as usize / self.program.vocab, token as usize % self.program.vocab);
        let mut x: Vec<f32> = row(embed.table, token).iter().map(|x| x * embed.scale).collect();
        if let Some(positions) = &embed.positions {
            x.iter_mut().zip(row(positions.table, position)).for_each(|(x, y)| *x += y);
        }
        if let Some(types) = &embed.types {
            let of_type = &self.vector(types.table)[kind * width..][..width];
            x.iter_mut().zip(of_type).for_each(|(x, y)| *x += y);
        }
        self.optional_norm(embed.norm, &x)
    }

    /// Returns the output of a dense network for one row.
    fn dense(&self, op: &Dense, row: usize, x: &[f32]) -> Vec<f32> {
        let h = self.optional_norm(op.norm, x);
        let gate = op.gate.map(|gate| self.linear(&gate, row, &h));
        let g = activated(gate.as_deref(), &self.linear(&op.up, row, &h), op.activation);
        self.optional_norm(op.post_norm, &self.linear(&op.down, row, &g))
    }

    /// Returns the output of a mixture of experts for one row.
    fn experts(&self, op: &Experts, row: usize, x: &[f32]) -> Vec<f32> {
        let h = self.optional_norm(op.norm, x);
        let mut y = match &op.shared {
            Some(shared) => self.shared(shared, op, row, &h),
            None => vec![0.0; self.program.hidden],
        };
        let input = op.latent.map_or_else(|| h.clone(), |latent| self.linear(&latent.down, row, &h));
        let mut sum = vec![0.0; input.len()];
        let router = &op.router;
        let router_input = router.norm.map_or_else(|| h.clone(), |norm| self.norm(&norm, x));
        let logits = self.linear(&router.linear, row, &router_input);
        let scale = |expert: usize| router.expert_scale.map_or(1.0, |scale| self.vector(scale)[expert]);
        let bias = router.selection_bias.map(|bias| self.vector(bias));
        let chosen = ops::route(&logits, router, bias);
        for (expert, weight) in chosen {
            let gate = op.gate.map(|gate| self.part(&gate, expert, &input, op.width));
            let up = self.part(&op.up, expert, &input, op.width);
            let g = activated(gate.as_deref(), &up, op.activation);
            let out = self.part(&op.down, expert, &g, input.len());
            let weight = weight * scale(expert);
            sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += weight * out);
        }
        let sum = op.latent.map_or_else(|| sum.clone(), |latent| self.linear(&latent.up, row, &sum));
        y.iter_mut().zip(sum).for_each(|(y, sum)| *y += sum);
        if let Some(beside) = &op.beside {
            y = self.norm(&beside.sum_norm, &y);
            y.iter_mut().zip(self.dense(&beside.dense, row, x)).for_each(|(y, dense)| *y += dense);
        }
        self.optional_norm(op.post_norm, &y)
    }

    /// Returns the output of a shared expert for one row.
    fn shared(&self, op: &SharedExpert, experts: &Experts, row: usize, h: &[f32]) -> Vec<f32> {
        let gate = op.gate.map(|gate| self.linear(&gate, row, h));
        let g = activated(gate.as_deref(), &self.linear(&op.up, row, h), experts.activation);
        let mut y = self.linear(&op.down, row, &g);
        if let Some(gate) = &op.output_gate {
            let factor = 1.0 / (1.0 + (-self.linear(gate, row, h)[0]).exp());
            y.iter_mut().for_each(|y| *y *= factor);
        }
        y
    }

    /// Computes an output of a row.
    fn head(&mut self, op: &Head, row: usize, kind: &OutputKind<'_>, x: &[f32]) -> OutputValue {
        let h = self.norm(&op.norm, x);
        let mut logits = self.linear(&op.linear, row, &h);
        for logit in &mut logits {
            *logit *= op.scale;
            if let Some(cap) = op.soft_cap {
                *logit = ops::soft_cap(*logit, cap);
            }
        }
        let embedding = || op.projection.map_or_else(|| h.clone(), |op| self.plain(&op.linear, &h));
        let embedding = OutputValue::Embedding(embedding());
        sampling::answer(&logits, kind, &mut self.sampler).unwrap_or(embedding)
    }
}

/// Returns the activation of a row, with or without a gate.
fn activated(gate: Option<&[f32]>, up: &[f32], activation: Activation) -> Vec<f32> {
    let of = |(i, &up): (usize, &f32)| ops::activate(gate.map(|gate| gate[i]), up, activation);
    up.iter().enumerate().map(of).collect()
}

/// `x += y * scale`, row by row.
fn add(x: &mut [Vec<f32>], y: &[Vec<f32>], scale: f32) {
    for (x, y) in x.iter_mut().flatten().zip(y.iter().flatten()) {
        *x += y * scale;
    }
}
