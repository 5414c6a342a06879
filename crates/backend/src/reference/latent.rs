//! Latent attention.

use super::{AttentionShape, Half, HeadVectors, ReferenceRunner, ops};
use crate::{Latent, LatentQuery, LatentShape, Linear, Step};

impl ReferenceRunner {
    /// Returns the output of latent attention for each row.
    pub(super) fn latent(&mut self, op: &Latent, step: &Step<'_>, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let LatentShape { heads, plain, rotated, latent, value } = op.shape;
        let groups = self.program.kv.groups.len();
        let rope = self.program.ropes[op.rope].clone();
        let mut added = Vec::with_capacity(x.len());
        for sequence in step.sequences {
            let table = sequence.table(step.pages, op.kv.group, groups);
            let mut queries = Vec::new();
            for (position, row) in (sequence.start..).zip(sequence.rows.clone()) {
                let h = self.optional_norm(op.norm, &x[row]);
                let down = self.linear(&op.down, row, &h);
                let mut k = self.norm(&op.latent_norm, &down[..latent]);
                let coordinates = step.coordinates_of(row, position);
                let mut turned = down[latent..].to_vec();
                ops::rotate(&mut turned, position, coordinates, &rope);
                k.extend(turned);
                let mut arena = self.arena();
                arena.store(table, op.kv, Half::K, position, &k);
                arena.store(table, op.kv, Half::V, position, &k);
                let factor = op.position_scale.map_or(1.0, |scale| ops::position_scale(&scale, position));
                let q = self.latent_query(&op.query, row, &h);
                for (head, q) in q.chunks_exact(plain + rotated).enumerate() {
                    let mut query = self.part(&op.absorb, head, &q[..plain], latent);
                    let mut turned = q[plain..].to_vec();
                    ops::rotate(&mut turned, position, coordinates, &rope);
                    query.extend(turned);
                    queries.extend(query.into_iter().map(|x| x * factor));
                }
            }
            let [k, v] = [Half::K, Half::V].map(|half| self.arena().gather(table, op.kv, half));
            let head_dim = op.shape.key_dim();
            let group = self.program.kv.groups[op.kv.group];
            let spans: Vec<_> = step.spans_of(sequence).collect();
            let shape = AttentionShape {
                heads,
                kv_heads: 1,
                head_dim,
                start: sequence.start,
                scale: op.scale,
                soft_cap: None,
                window: group.window,
                len: None,
                spans: group.spans.then_some(&spans[..]),
            };
            let mut attended = vec![0.0; queries.len()];
            (self.attention)(&queries, &k, &v, HeadVectors::default(), &shape, &mut attended);
            for (attended, row) in attended.chunks_exact(heads * head_dim).zip(sequence.rows.clone()) {
                let all: Vec<f32> = attended
                    .chunks_exact(head_dim)
                    .enumerate()
                    .flat_map(|(head, a)| self.part(&op.value, head, &a[..latent], value))
                    .collect();
                added.push(self.optional_norm(op.post_norm, &self.linear(&op.out, row, &all)));
            }
        }
        self.count("latent");
        added
    }

    fn latent_query(&self, query: &LatentQuery, row: usize, h: &[f32]) -> Vec<f32> {
        match query {
            LatentQuery::Direct(linear) => self.linear(linear, row, h),
            LatentQuery::Down { down, rank: _, norm, up } => {
                let up: &Linear = up;
                self.linear(up, row, &self.norm(norm, &self.linear(down, row, h)))
            }
        }
    }
}
