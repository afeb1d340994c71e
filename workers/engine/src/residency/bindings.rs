//! A segment's parameters, ready to be computed with.

use candle_core::{Device, Result as TensorResult, Tensor};

use super::declare::{ConvId, Declarations, LayerSpec, LinearId, NormId, Parameter, TableId, UpsampleId};
use super::executor::ExecutorError;
use crate::formats::{TensorEntry, WeightSet, WeightsError, read_f32};
use crate::ops::{Conv2d, Linear, UpsampleConv2d};

/// Where a segment's numbers come from.
pub trait ParameterSource: Send + Sync {
    /// Opens `parameter` for reading.
    ///
    /// # Errors
    /// If the parameter is missing or of another shape.
    fn open(&self, parameter: &Parameter) -> Result<Box<dyn Numbers + '_>, WeightsError>;

    /// The numbers of `parameter` will not be read soon: what the system keeps of them in memory may go.
    fn let_go(&self, _parameter: &Parameter) {}
}

/// The numbers of one parameter, row-major, read in parts and by several threads.
pub trait Numbers: Sync {
    /// Reads the numbers from `at` on into all of `out`.
    ///
    /// # Panics
    /// If there are not so many.
    fn read(&self, at: usize, out: &mut [f32]);
}

impl Numbers for TensorEntry<'_> {
    fn read(&self, at: usize, out: &mut [f32]) {
        read_f32(self, at, out);
    }
}

impl ParameterSource for WeightSet {
    fn open(&self, parameter: &Parameter) -> Result<Box<dyn Numbers + '_>, WeightsError> {
        let shapes: Vec<&[usize]> = parameter.shapes.iter().map(Vec::as_slice).collect();
        Ok(Box::new(self.check(&parameter.name, &shapes)?))
    }

    fn let_go(&self, parameter: &Parameter) {
        WeightSet::let_go(self, &parameter.name);
    }
}

/// Scale and shift of a normalisation, `[C]` each.
#[derive(Clone, Debug)]
struct Norm {
    weight: Tensor,
    bias: Tensor,
}

/// The bound layers of one segment. A handle is valid in the bindings of the segment that declared it.
#[derive(Debug, Default)]
pub struct Bindings {
    linears: Vec<Linear>,
    convs: Vec<Conv2d>,
    upsamples: Vec<UpsampleConv2d>,
    norms: Vec<Norm>,
    tables: Vec<Tensor>,
    bytes: u64,
}

impl Bindings {
    /// Reads and packs everything that `declarations` name.
    ///
    /// # Errors
    /// If a tensor is missing or of another shape.
    pub fn bind(declarations: &Declarations, source: &dyn ParameterSource) -> Result<Self, ExecutorError> {
        let mut bindings = Self::default();
        for layer in declarations.layers() {
            bindings.bind_layer(layer, source)?;
        }
        Ok(bindings)
    }

    fn bind_layer(&mut self, layer: &LayerSpec, source: &dyn ParameterSource) -> Result<(), ExecutorError> {
        match layer {
            LayerSpec::Linear { parts: _, input, outputs, bias } => {
                let (mut weights, mut shift) = (Vec::new(), Vec::new());
                for parameter in layer.parameters() {
                    match parameter.shapes[0].len() {
                        1 => append(&parameter, source, &mut shift)?,
                        _ => weights.push(source.open(&parameter)?),
                    }
                }
                let rows: usize = outputs.iter().sum();
                let shift = if *bias { Some(tensor(shift, &[rows])?) } else { None };
                let read = |row: usize, out: &mut [f32]| {
                    // The part that the row is of, and its place there.
                    let (mut part, mut place) = (0, row);
                    while place >= outputs[part] {
                        place -= outputs[part];
                        part += 1;
                    }
                    weights[part].read(place * input, out);
                };
                let linear = Linear::of_rows(&read, shift.as_ref(), [rows, *input])?;
                self.bytes += linear.bytes() as u64;
                self.linears.push(linear);
            }
            LayerSpec::Conv { shape: s, .. } => {
                let (weight, bias) = pair(layer, source)?;
                let rows = |row: usize, out: &mut [f32]| weight.read(row * out.len(), out);
                let shape = [s.output, s.input, s.kernel, s.kernel];
                let conv = Conv2d::of_rows(&rows, Some(&bias), shape, s.stride, s.padding)?;
                self.bytes += conv.bytes() as u64;
                self.convs.push(conv);
            }
            LayerSpec::Upsample { channels, .. } => {
                let (weight, bias) = pair(layer, source)?;
                let rows = |row: usize, out: &mut [f32]| weight.read(row * out.len(), out);
                let upsample = UpsampleConv2d::of_rows(&rows, Some(&bias), *channels, *channels)?;
                self.bytes += upsample.bytes() as u64;
                self.upsamples.push(upsample);
            }
            LayerSpec::Norm { channels, .. } => {
                let (weight, bias) = pair(layer, source)?;
                let mut scale = vec![0f32; *channels];
                weight.read(0, &mut scale);
                self.bytes += 4 * 2 * *channels as u64;
                self.norms.push(Norm { weight: tensor(scale, &[*channels])?, bias });
            }
            LayerSpec::Table { shape, .. } => {
                for parameter in layer.parameters() {
                    self.tables.push(read(&parameter, source)?);
                }
                self.bytes += 4 * shape.iter().product::<usize>() as u64;
            }
        }
        Ok(())
    }

    /// Bytes that the bound layers hold.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A fully connected layer.
    pub fn linear(&self, id: LinearId) -> &Linear {
        &self.linears[id.0]
    }

    /// A convolution.
    pub fn conv(&self, id: ConvId) -> &Conv2d {
        &self.convs[id.0]
    }

    /// An upsampling convolution.
    pub fn upsample(&self, id: UpsampleId) -> &UpsampleConv2d {
        &self.upsamples[id.0]
    }

    /// Scale and shift of a normalisation.
    pub fn norm(&self, id: NormId) -> (&Tensor, &Tensor) {
        let norm = &self.norms[id.0];
        (&norm.weight, &norm.bias)
    }

    /// A plain tensor.
    pub fn table(&self, id: TableId) -> &Tensor {
        &self.tables[id.0]
    }
}

fn tensor(data: Vec<f32>, shape: &[usize]) -> TensorResult<Tensor> {
    Tensor::from_vec(data, shape, &Device::Cpu)
}

/// All numbers of a parameter, behind those of `out`.
fn append(parameter: &Parameter, source: &dyn ParameterSource, out: &mut Vec<f32>) -> Result<(), ExecutorError> {
    let (before, more) = (out.len(), parameter.shapes[0].iter().product::<usize>());
    let numbers = source.open(parameter)?;
    out.resize(before + more, 0.0);
    numbers.read(0, &mut out[before..]);
    Ok(())
}

fn read(parameter: &Parameter, source: &dyn ParameterSource) -> Result<Tensor, ExecutorError> {
    let mut data = Vec::new();
    append(parameter, source, &mut data)?;
    Ok(tensor(data, &parameter.shapes[0])?)
}

/// The weight, opened, and the bias of a layer that has exactly these.
fn pair<'a>(
    layer: &LayerSpec,
    source: &'a dyn ParameterSource,
) -> Result<(Box<dyn Numbers + 'a>, Tensor), ExecutorError> {
    let parameters = layer.parameters();
    let [weight, bias] = parameters.as_slice() else {
        return Err(ExecutorError::Tensor(candle_core::Error::Msg(format!("{layer:?} is not a weight and a bias"))));
    };
    Ok((source.open(weight)?, read(bias, source)?))
}
