//! AWQ and GPTQ, whose files have outputs as columns: a matrix is transposed and converted as a whole when its first row is
//! read. At most two such matrices of a model are in memory at a time.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use half::f16;
use paguro_backend::{ByteSource, Bytes, WeightFormat};

use super::{BLOCK, Folder, Found, bad, check, dims, float, group_of, put_block, range, scheme::Columns};
use crate::{error::ModelError, tensor::Tensor};

/// Columns of the four-bit numbers in a word of AWQ, lowest first.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// The matrices that were converted last. Two, because threads that load experts may be at the end of one and at the
/// beginning of the next.
#[derive(Clone, Default)]
pub(super) struct Cache(Arc<Mutex<Vec<Converted>>>);

/// A matrix and its converted bytes.
type Converted = (usize, Arc<Vec<u8>>);

pub(super) fn matrix(
    folder: &Folder<'_>,
    scheme: &Columns,
    base: &str,
    tensor: &Tensor,
    cache: &Cache,
) -> Result<Found, ModelError> {
    let per_word = 32 / scheme.bits;
    let [words, columns] = dims(tensor)?;
    let (inputs, outputs) =
        if scheme.awq { (words, columns * per_word) } else { (words * per_word, columns) };
    check(tensor, &["I32", "U32"], &[words, columns])?;
    let name = |part: &str| format!("{base}.{part}");
    let mut used = vec![tensor.name.clone(), name("scales"), name("qzeros")];
    let scales = folder.require(&used[1])?;
    let [groups, _] = dims(scales)?;
    let scale_format = float(scales)?;
    check(scales, &[scale_format.name()], &[groups, outputs])?;
    let zeros = folder.require(&used[2])?;
    check(zeros, &["I32", "U32"], &[groups, outputs / per_word])?;
    if !inputs.is_multiple_of(BLOCK) {
        return Err(ModelError::unsupported(format!("`{}`, {inputs} inputs in blocks of 32", tensor.name)));
    }
    let order = match folder.get(&name("g_idx")) {
        Some(indices) => {
            used.push(indices.name.clone());
            read_order(indices, inputs, groups)?
        }
        None => None,
    };
    let group = if order.is_some() { inputs } else { group_of(scales, inputs, groups)? };
    let format = match (order.is_some(), scheme.bits, scheme.symmetric) {
        (true, ..) | (_, 8, false) => WeightFormat::F16,
        (_, 8, true) => WeightFormat::Q8_0,
        (_, _, true) => WeightFormat::Q4_0,
        _ => WeightFormat::Q5_0,
    };
    let source = ByColumns {
        name: tensor.name.clone(),
        scheme: *scheme,
        format,
        inputs,
        outputs,
        group,
        order,
        scale_format,
        quants: tensor.bytes.clone(),
        zeros: zeros.bytes.clone(),
        scales: scales.bytes.clone(),
        id: tensor as *const Tensor as usize,
        cache: cache.clone(),
    };
    let len = outputs * format.row_bytes(inputs);
    Ok(Found { format, rows: outputs, cols: inputs, bytes: Bytes::new(Arc::new(source), 0, len), used })
}

/// Returns the group of each input, unless they are in order.
fn read_order(tensor: &Tensor, inputs: usize, groups: usize) -> Result<Option<Vec<u32>>, ModelError> {
    check(tensor, &["I32", "U32"], &[inputs])?;
    let unreadable =
        |error: io::Error| ModelError::Unreadable { tensor: tensor.name.clone(), problem: error.to_string() };
    let bytes = tensor.bytes.read().map_err(unreadable)?;
    let order: Vec<u32> = bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
    if order.iter().any(|&group| group as usize >= groups) {
        return Err(bad(&tensor.name, &format!("it names groups that do not exist ({groups} do)")));
    }
    let size = inputs.div_ceil(groups);
    let is_plain = order.iter().enumerate().all(|(input, &group)| input / size == group as usize);
    Ok(if is_plain { None } else { Some(order) })
}

struct ByColumns {
    name: String,
    scheme: Columns,
    format: WeightFormat,
    inputs: usize,
    outputs: usize,
    /// Inputs that share a scale, where they are in order.
    group: usize,
    order: Option<Vec<u32>>,
    scale_format: WeightFormat,
    quants: Bytes,
    zeros: Bytes,
    scales: Bytes,
    /// Tells the matrices in the cache apart.
    id: usize,
    cache: Cache,
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}

impl ByColumns {
    fn converted(&self) -> io::Result<Arc<Vec<u8>>> {
        // Held while it is converted: threads read the same matrix at the same time.
        let mut cache = self.cache.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, bytes)) = cache.iter().find(|(id, _)| *id == self.id) {
            return Ok(bytes.clone());
        }
        cache.truncate(1);
        let bytes = Arc::new(self.convert()?);
        cache.insert(0, (self.id, bytes.clone()));
        Ok(bytes)
    }

    fn convert(&self) -> io::Result<Vec<u8>> {
        let Columns { bits, awq, zero_offset, .. } = self.scheme;
        let (per_word, mask) = (32 / bits, (1u32 << bits) - 1);
        let (quants, zeros) = (words(&self.quants.read()?), words(&self.zeros.read()?));
        let mut scales = vec![0.0; self.scales.len() / self.scale_format.block_bytes()];
        self.scale_format.dequantize(&self.scales.read()?, &mut scales);
        // Position of a column's number in the words of a row.
        let place = |column: usize| {
            let index = column % per_word;
            let index = if awq { AWQ_ORDER.iter().position(|&it| it == index).unwrap_or(0) } else { index };
            (column / per_word, index * bits)
        };
        let words_of_row = self.outputs / per_word;
        let quant = |input: usize, output: usize| {
            let (word, shift) = match awq {
                true => {
                    let (word, shift) = place(output);
                    (input * words_of_row + word, shift)
                }
                false => (input / per_word * self.outputs + output, input % per_word * bits),
            };
            (quants[word] >> shift & mask) as i32
        };
        let zero = |group: usize, output: usize| {
            let (word, shift) = place(output);
            (zeros[group * words_of_row + word] >> shift & mask) as i32 + zero_offset
        };
        let mut out = Vec::with_capacity(self.outputs * self.format.row_bytes(self.inputs));
        let range = range(self.format);
        for output in 0..self.outputs {
            for first in (0..self.inputs).step_by(BLOCK) {
                if self.format == WeightFormat::F16 {
                    for input in first..first + BLOCK {
                        let group = self.order.as_ref().map_or(input / self.group, |it| it[input] as usize);
                        let number = quant(input, output) - zero(group, output);
                        let value = scales[group * self.outputs + output] * number as f32;
                        out.extend(f16::from_f32(value).to_le_bytes());
                    }
                    continue;
                }
                let group = first / self.group;
                let zero = zero(group, output);
                let numbers: [i32; BLOCK] = std::array::from_fn(|i| quant(first + i, output) - zero);
                if let Some(number) = numbers.iter().find(|number| !range.contains(number)) {
                    return Err(io::Error::other(format!(
                        "`{}` has a zero point of {zero}, which `sym` in `quantization_config` excludes (weight {number})",
                        self.name
                    )));
                }
                let scale = f16::from_f32(scales[group * self.outputs + output]).to_bits();
                put_block(self.format, scale, &numbers, &mut out);
            }
        }
        Ok(out)
    }
}

impl ByteSource for ByColumns {
    fn size(&self) -> u64 {
        (self.outputs * self.format.row_bytes(self.inputs)) as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let bytes = self.converted()?;
        let part = bytes.get(offset as usize..).and_then(|rest| rest.get(..out.len()));
        out.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn check_unchanged(&self) -> io::Result<()> {
        [&self.quants, &self.zeros, &self.scales].into_iter().try_for_each(Bytes::check_unchanged)
    }
}
